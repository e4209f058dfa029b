"""Child processes that talk over pipes and end with their parent."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType

JOIN_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0


class Child:
    """One process: ``target(pipe, *arguments)``. ``None`` on the pipe ends it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(target, theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        if self._process.pid is None:
            raise RuntimeError("the process has not been started")
        return self._process.pid

    def ask(self, *command: object) -> object:
        """Send a command and wait for its answer. Raises RuntimeError when the process fails or takes too long."""
        self.pipe.send(command)
        if not self.pipe.poll(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"no answer to {command[0]!r} within {ANSWER_TIMEOUT_S:g} s")
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"the process ended during {command[0]!r}; see its error above") from error

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.pipe.send(None)
            self._process.join(JOIN_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(JOIN_TIMEOUT_S)


def _main(target: Callable[..., None], pipe: Connection, arguments: tuple[object, ...]) -> None:
    try:
        target(pipe, *arguments)
    except EOFError:
        pass  # the parent has gone; nobody is left to tell
