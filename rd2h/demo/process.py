"""Processes that the demo and the end-to-end tests start, watch and stop by process id."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rd2h.demo.lifetime import LaunchError

STOP_GRACE_S = 8.0
_POLL_S = 0.1
_REPORT_S = 5.0
_TAIL_LINES = 25

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """A Progress that shows nothing."""


class ManagedProcess(ABC):
    """A process with a log file, in a process group of its own."""

    def __init__(self, name: str, pid: int, log_path: Path, url: str | None = None) -> None:
        """`url` is where the process answers `GET /health` with 200 once it is ready; None for no HTTP."""
        self.name = name
        self.pid = pid
        self.log_path = log_path
        self._url = url

    @property
    def url(self) -> str:
        """Base URL. Raises LaunchError for a process without HTTP."""
        if self._url is None:
            raise LaunchError(f"{self.name} has no HTTP address")
        return self._url

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code (negative: killed by that signal), or None while the process runs."""

    @property
    def alive(self) -> bool:
        """True while the main process runs."""
        return self.poll() is None

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the whole process group; a group that is gone is fine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to every process of the group, as a crash would; waits until the main process is gone."""
        self.signal_group(signal.SIGKILL)
        self.wait(STOP_GRACE_S)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to the main process, then SIGKILL to whatever is left of the group. Safe to call twice."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                self.wait(grace_s)
        if self.alive:
            self.kill()
        self.signal_group(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Waits for the end of the main process and returns its exit code. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return code

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of the log, for error messages."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:])

    def wait_ready(self, timeout_s: float, progress: Progress = silent, path: str = "/health") -> float:
        """Waits until `GET url+path` answers 200 and returns the seconds waited.

        Raises LaunchError, with the end of the log, when the process ends first or the time is over.
        """
        start = time.monotonic()
        report_at = start + _REPORT_S
        while True:
            # The process first: an answer from a port whose owner died is somebody else's.
            code = self.poll()
            if code is not None:
                raise LaunchError(
                    f"{self.name} ended with code {code} before it was ready; its log ends:\n{self.log_tail()}"
                )
            if http_ok(self.url + path):
                return time.monotonic() - start
            now = time.monotonic()
            if now - start > timeout_s:
                raise LaunchError(f"{self.name} is not ready after {timeout_s:.0f} s; its log ends:\n{self.log_tail()}")
            if now >= report_at:
                progress(f"{self.name} is starting ({now - start:.0f} s)")
                report_at = now + _REPORT_S
            time.sleep(_POLL_S)


def http_ok(url: str, timeout_s: float = 2.0) -> bool:
    """True when a GET of a loopback URL answers 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


class ChildProcess(ManagedProcess):
    """A process started by this one."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", log_path: Path, url: str | None) -> None:
        super().__init__(name, popen.pid, log_path, url)
        self._popen = popen

    def poll(self) -> int | None:
        return self._popen.poll()


def start_child(
    name: str,
    module_and_arguments: Sequence[str],
    log_path: Path,
    *,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> ChildProcess:
    """Runs `python -m MODULE ARGUMENTS...` in a session of its own, bound to the life of this process.

    Call it from a thread that lives as long as the child should (see lifetime.die_with_parent).
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rd2h.demo.child", str(os.getpid()), *module_and_arguments]
    with log_path.open("ab") as log:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(env or {}),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    return ChildProcess(name, popen, log_path, url)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `changes`; byte code is cached (imports dominate the start of vLLM)."""
    env = {**os.environ, **changes}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
