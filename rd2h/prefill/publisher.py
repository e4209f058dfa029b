"""Prefill's publisher: tells every Decode endpoint which layers are ready, and keeps storage gated until it has read.

The forward thread calls ``publish`` and ``wait_writable``. A message to an endpoint that is ready goes out on the
calling thread, so nothing is handed over on the way; one background thread does all the rest: it connects, receives and
watches time limits, and runs on events only. All state and sockets are under one lock, which is never held while
waiting. A dead or slow endpoint delays nobody else: every endpoint is a non-blocking state of its own.

Bounds: ``MAX_ENDPOINTS`` endpoints, ``MAX_OUTBOX`` queued messages an endpoint, ``MAX_STOPPED`` remembered tokens;
connect and handshake have deadlines; a sent message stays gated until acknowledged, or until nothing has been heard
from its Decode for ``peer_timeout_s`` (see ``rd2h.lease`` for why that is safe), or until a new generation answers on
the same address; towards a legacy Decode, until one message has been unanswered for ``legacy_ack_timeout_s``.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from rd2h.cpus import bind_this_thread
from rd2h.gates import Slot, SlotGates, Writes
from rd2h.prefill.book import Clock, PublishBook
from rd2h.prefill.device import DeviceOrder, WaitForDevice
from rd2h.prefill.endpoint import Endpoint, EndpointChunk, EndpointKey, LayerMessage
from rd2h.prefill.options import PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.wire import Refusal

__all__ = ["Publisher", "PublisherOptions", "SourceMemory"]

logger = logging.getLogger(__name__)


Awaited = tuple[Sequence[Slot] | None, Writes]


class _Locked:
    """The publisher's lock as a context; writers are woken when what they wait for has opened under it. Not nested."""

    __slots__ = ("_changed", "_gates", "_shut", "waiting")

    def __init__(self, changed: threading.Condition, gates: SlotGates) -> None:
        self._changed, self._gates, self._shut = changed, gates, 0
        self.waiting: list[Awaited] = []
        """What each waiting writer is about to overwrite."""

    def __enter__(self) -> None:
        self._changed.acquire()
        self._shut = len(self._gates)

    def __exit__(self, *error: object) -> None:
        if len(self._gates) < self._shut and not all(self._gates.blocked(*awaited) for awaited in self.waiting):
            self._changed.notify_all()
        self._changed.release()


class Publisher:
    """See the module. ``on_failure`` is called from any thread, without the lock, with children that get no more KV."""

    def __init__(
        self,
        memory: SourceMemory,
        options: PublisherOptions,
        stats: TransferStats,
        on_failure: Callable[[Sequence[Refusal]], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._stats, self._on_failure, self._clock = stats, on_failure, clock
        self._changed = threading.Condition()
        self._book = PublishBook(memory, options, stats, clock)
        self._locked = _Locked(self._changed, self._book.gates)
        self._device = DeviceOrder()
        self._stopping = False
        self._handing_out = 0
        """Threads that are about to hand out failures."""
        self._release_at_s = math.inf
        """When writers need not wait for anybody any more: at once after ``close``, later when the thread died."""
        self._peer_timeout_s, self._cpus = options.peer_timeout_s, options.cpus
        self._thread = threading.Thread(target=self._run, name="rd2h-publisher", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close all connections; waiting writers are released."""
        self._device.close(timeout_s)
        with self._changed:
            if not self._stopping and self._thread.is_alive():
                self._book.watch.wake()  # before the thread can end, which closes what this writes to
            self._stopping = self._book.closed = True
            self._release_at_s = -math.inf
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the background threads run."""
        return self._thread.is_alive() and self._device.alive

    # --- forward thread ---

    def publish(
        self,
        layer_idx: int,
        chunks: Sequence[EndpointChunk],
        *,
        last_layer: bool,
        after: WaitForDevice | None = None,
    ) -> None:
        """Close the gates of this layer and send its ready messages, or queue them; returns at once.

        With ``after`` they go out when it has returned, on another thread: the device has not written the layer yet.
        """
        held: list[tuple[Endpoint, LayerMessage]] = []
        with self._locked:
            for chunk in chunks:
                prepared = self._book.prepare(layer_idx, chunk, last_layer)
                if prepared is not None and after is not None:
                    held.append(prepared)
                elif prepared is not None:
                    self._book.enqueue(*prepared)
        if after is not None and held:
            self._device.then(after, lambda error: self._written(held, error))
        self._report()

    def fail_children(self, key: EndpointKey, failures: Sequence[Refusal]) -> None:
        """Tell a Decode that Prefill will not deliver these children, and stop publishing them."""
        with self._locked:
            self._book.tell_failure(key, failures)
        self._report()

    def stopped(self, token: bytes) -> str | None:
        """Why a child is no longer published, or None."""
        with self._changed:
            return self._book.stopped.get(token)

    def wait_writable(self, slots: Iterable[Slot] | None, writes: Writes) -> None:
        """Block until no Decode may still read what these writes overwrite.

        Ends for every entry: it is acknowledged, or its endpoint never got it, or its Decode is given up. When the
        publisher's thread has died nobody is left to tell, so it ends when every read lease has.
        """
        gates = self._book.gates
        if not len(gates):
            return
        awaited = (list(slots) if slots is not None else None, writes)
        with self._changed:
            if not gates.blocked(*awaited):
                return
            begin = time.monotonic()
            self._locked.waiting.append(awaited)
            try:
                while gates.blocked(*awaited) and (left_s := self._release_at_s - self._clock()) > 0:
                    self._changed.wait(None if left_s == math.inf else left_s)
            finally:
                self._locked.waiting.remove(awaited)
        self._stats.add(gate_waits=1, gate_wait_seconds=time.monotonic() - begin)

    def outstanding(self) -> int:
        """Ready messages that are not yet acknowledged or given up."""
        with self._changed:
            return len(self._book.gates)

    def contacting(self) -> bool:
        """Whether ``on_failure`` may still be called for a Decode that has not answered at all.

        Bounded by connect and handshake timeouts. Once this is False every earlier failure has been handed out.
        """
        with self._changed:
            return not self._stopping and (self._handing_out > 0 or self._book.contacting)

    # --- any thread ---

    def _written(self, held: Sequence[tuple[Endpoint, LayerMessage]], error: str) -> None:
        """The device has written the layer of these messages, or has failed."""
        with self._locked:
            for endpoint, message in held:
                try:
                    self._book.enqueue(endpoint, message, error)
                except Exception as problem:
                    # Nobody above can tell whose layer it was: its gate would stay shut for ever.
                    logger.exception("rd2h: a layer could not be told to Decode %s", endpoint.key)
                    self._book.break_off(endpoint, message, f"Prefill could not tell a layer: {problem}")
        self._report()

    def _report(self) -> None:
        """Hand noted failures out. Without the lock."""
        if self._book.failed:
            with self._changed:
                failed, self._book.failed = self._book.failed, []
                self._handing_out += 1
            try:
                if failed:
                    self._on_failure(failed)
            finally:
                with self._changed:
                    self._handing_out -= 1

    # --- background thread ---

    def _run(self) -> None:
        try:
            bind_this_thread(self._cpus)
            while not self._stopping:
                check_at_s = self._book.check_at_s
                fds = self._book.watch.wait(None if check_at_s == math.inf else max(0.0, check_at_s - self._clock()))
                with self._locked:
                    self._book.step(fds)
                self._report()
        except Exception:
            logger.exception("rd2h publisher thread died")
            raise
        finally:
            with self._changed:
                self._stopping = True
                self._release_at_s = min(self._release_at_s, self._clock() + self._peer_timeout_s)
                self._book.close()
                self._changed.notify_all()
            self._book.terminate()
