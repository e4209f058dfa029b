"""Starts engines through a fork server (fork_server.py)."""

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rd2h.demo.lifetime import LaunchError
from rd2h.demo.process import ChildProcess, ManagedProcess, Progress, silent, start_child

IMPORT_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 30.0
_REPORT_S = 5.0


class ForkedProcess(ManagedProcess):
    """An engine that the fork server forked; the server is its parent and knows its exit code."""

    def __init__(self, name: str, pid: int, log_path: Path, url: str, server: "ForkServerClient") -> None:
        super().__init__(name, pid, log_path, url)
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.poll(self.pid)
        return self._code


class ForkServerClient:
    """One fork server, started on entry and ended, with every engine it forked, on exit."""

    def __init__(self, log_path: Path, env: Mapping[str, str] | None = None) -> None:
        """`env`: what must be set before vLLM is imported, such as OMP_NUM_THREADS."""
        self._log_path = log_path
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self._process: ChildProcess | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        # Tests may poll from more than one thread; a request and its answer belong together.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the server; it is usable after wait_ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            self._process = start_child(
                "fork server",
                ["rd2h.demo.fork_server", str(theirs.fileno())],
                self._log_path,
                env=self._env,
                pass_fds=[theirs.fileno()],
            )
        self._connection = ours

    def wait_ready(self, progress: Progress = silent) -> None:
        """Waits until vLLM is imported. Raises LaunchError with the end of the log when that fails."""
        waited_s = 0.0
        while waited_s < IMPORT_TIMEOUT_S:
            try:
                self._read_line(_REPORT_S)
            except TimeoutError:
                waited_s += _REPORT_S
                progress(f"importing vLLM once for all engines ({waited_s:.0f} s)")
            else:
                return
        raise LaunchError(f"vLLM is not imported after {IMPORT_TIMEOUT_S:.0f} s; see {self._log_path}")

    def fork(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path, url: str
    ) -> ForkedProcess:
        """Forks one engine; it is ready when ManagedProcess.wait_ready says so."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        start = {"arguments": list(arguments), "environment": dict(environment), "log": str(log_path)}
        pid = self._ask({"start": start})["pid"]
        return ForkedProcess(name, pid, log_path, url, self)

    def poll(self, pid: int) -> int | None:
        """Exit code of a forked engine, None while it runs; a dead server has taken all engines with it."""
        if self._process is None or not self._process.alive:
            return -9
        code = self._ask({"poll": pid})["code"]
        return None if code is None else int(code)

    def close(self) -> None:
        """Ends the server and its engines."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    def __enter__(self) -> "ForkServerClient":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._connection is None:
                raise LaunchError("the fork server is not running")
            self._connection.sendall(json.dumps(message).encode() + b"\n")
            return self._read_line(ANSWER_TIMEOUT_S)

    def _read_line(self, timeout_s: float) -> dict[str, Any]:
        if self._connection is None or self._process is None:
            raise LaunchError("the fork server is not running")
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            received = self._connection.recv(65536)
            if not received:
                tail = self._process.log_tail()
                raise LaunchError(f"the fork server ended; its log ({self._log_path}) ends:\n{tail}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
