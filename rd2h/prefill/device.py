"""Order between the device and the publisher: a layer is told only when the device has written it.

The forward thread runs ahead of an accelerator. It records an event after a layer's KV scatter and goes on; one thread
waits for the events, in order, and lets the layer out. On a CPU the layer is written when the hook runs, so there are
no events and no thread.
"""

import importlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from rd2h.errors import RequestError

logger = logging.getLogger(__name__)

WaitForDevice = Callable[[], None]
RecordEvent = Callable[[], WaitForDevice]


def event_recorder(device: Any) -> RecordEvent | None:
    """How to record an event on ``device`` (a ``torch.device``); None for a CPU.

    The returned function records on the calling thread's current stream and gives the wait for it, which raises
    (torch: RuntimeError) when the device has failed.
    """
    if device.type == "cpu":
        return None
    torch = importlib.import_module("torch")
    accelerator = getattr(torch, device.type)

    def record() -> WaitForDevice:
        event = accelerator.Event()
        event.record()

        def wait() -> None:
            accelerator.set_device(device)
            event.synchronize()

        return wait

    return record


ENDED = "the thread that waits for the device has ended"


class DeviceOrder:
    """Runs actions in order, each after its wait. As bounded as what waits for acknowledgement (see the publisher).

    Every action is called once: an exception of a wait or of another action does not keep it from that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Around ``_ended`` and what is queued after it."""
        self._ended = False
        self._queue: queue.SimpleQueue[tuple[WaitForDevice, Callable[[str], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def then(self, wait: WaitForDevice, action: Callable[[str], None]) -> None:
        """Call ``action("")`` after ``wait`` returns, or ``action(error)`` when it fails. Called by one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rd2h-device-events", daemon=True)
            self._thread.start()
        with self._lock:
            ended = self._ended
            if not ended:
                self._queue.put((wait, action))
        if ended:
            action(ENDED)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, or is not needed yet."""
        return self._thread is None or self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, then end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        item = None
        try:
            while (item := self._queue.get()) is not None:
                self._act(item[1], self._wait(item[0]))
        finally:
            # Empty, unless the interpreter ends the thread, which no handler may stop.
            with self._lock:
                self._ended = True
            while item is not None:
                self._act(item[1], ENDED)
                item = None if self._queue.empty() else self._queue.get()

    @staticmethod
    def _wait(wait: WaitForDevice) -> str:
        """Why the wait failed, or "". Drivers raise what they like."""
        try:
            wait()
        except RequestError as refused:
            return str(refused)  # not the device: the layer is not to be told
        except Exception as problem:
            error = f"the device failed before a layer was written: {type(problem).__name__}: {problem}"
            logger.exception("rd2h: %s", error)
            return error
        return ""

    @staticmethod
    def _act(action: Callable[[str], None], error: str) -> None:
        try:
            action(error)
        except Exception:
            logger.exception("rd2h: a layer could not be told after the device had written it")
