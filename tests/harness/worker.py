"""Worker processes that are driven over pipes and stopped by their process id."""

import faulthandler
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 60.0


class WorkerError(RuntimeError):
    """The other side raised, died, or did not answer in time."""


class Worker:
    """A process that holds at most one object; ``call`` runs a method of it there and returns its value."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._pending = 0

    @property
    def pid(self) -> int:
        """Process id."""
        if self._process.pid is None:
            raise WorkerError("the worker was not started")
        return self._process.pid

    def start(self, kind: Callable[..., Any], *args: object, **kwargs: object) -> None:
        """Make the object, after closing the one before."""
        self._ask(("start", kind, args, kwargs), ANSWER_S)

    def call(self, method: str, *args: object, answer_s: float = ANSWER_S, **kwargs: object) -> Any:
        """Run a method and return what it returns. Raises WorkerError."""
        return self._ask(("call", method, args, kwargs), answer_s)

    def begin(self, method: str, *args: object, **kwargs: object) -> None:
        """Run a method without waiting; ``end`` must follow before anything else is asked."""
        self._pipe.send(("call", method, args, kwargs))
        self._pending += 1

    def ended(self) -> bool:
        """Whether what ``begin`` started has returned."""
        return self._pipe.poll(0)

    def end(self, answer_s: float = ANSWER_S) -> Any:
        """The value of what ``begin`` started."""
        self._pending -= 1
        return self._answer(answer_s)

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(self._ask(("memory", None, (), {}), ANSWER_S))

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._process.kill()
        self._process.join(10.0)

    def stop(self) -> None:
        """SIGSTOP: the process stands still."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def release(self) -> bool:
        """Close the object; True when the process may serve another test."""
        if not self._process.is_alive() or self._pending:
            return False
        try:
            self._ask(("close", None, (), {}), 15.0)
        except (WorkerError, OSError):
            return False
        return True

    def _ask(self, message: tuple[object, ...], answer_s: float) -> Any:
        if self._pending:
            raise WorkerError("an earlier call has not been ended")
        self._pipe.send(message)
        return self._answer(answer_s)

    def _answer(self, answer_s: float) -> Any:
        if not self._pipe.poll(answer_s):
            raise WorkerError(f"no answer within {answer_s:g} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerError("the worker process has died") from error
        if not good:
            raise WorkerError(value)
        return value


def _serve(pipe: Connection) -> None:
    faulthandler.enable()
    held: Any = None
    while True:
        try:
            what, name, args, kwargs = pipe.recv()
        except EOFError:
            return  # the test run has ended
        try:
            value: object = None
            if what == "start":
                if held is not None:
                    held.close()
                held = name(*args, **kwargs)
            elif what == "call":
                value = getattr(held, name)(*args, **kwargs)
            elif what == "memory":
                value = _resident_bytes()
            elif what == "close" and held is not None:
                held.close()
                held = None
            pipe.send((True, value))
        except Exception:  # noqa: BLE001 (the parent raises it again)
            pipe.send((False, traceback.format_exc()))


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
