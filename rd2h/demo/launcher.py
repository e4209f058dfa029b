"""Starts vLLM engines, meta service and proxy of the demo, and stops them all, whatever happens."""

import contextlib
import tempfile
from pathlib import Path
from types import TracebackType

from rd2h.demo.engine_spec import EngineSpec
from rd2h.demo.fork_client import ForkServerClient
from rd2h.demo.model import default_cache_dir
from rd2h.demo.ports import LOOPBACK, free_port, require_free
from rd2h.demo.process import ManagedProcess, Progress, silent, start_child

READY_TIMEOUT_S = 240.0


class Launcher:
    """Owns every process of one run. Use as a context manager: leaving it stops them, newest first."""

    def __init__(self, log_dir: Path, progress: Progress = silent, *, fork_server: bool = True) -> None:
        """With `fork_server` vLLM is imported once and engines start in seconds; without, each imports it itself."""
        self.log_dir = log_dir
        self.progress = progress
        # vLLM leaves sockets and rendezvous files behind in the folder for temporary files, about eight an engine.
        self._scratch = tempfile.TemporaryDirectory(prefix="rd2h-", ignore_cleanup_errors=True)
        self._temporary = {"TMPDIR": self._scratch.name}
        log_path = log_dir / "fork-server.log"
        self._fork_server = ForkServerClient(log_path, self._temporary) if fork_server else None
        self._fork_server_ready = False
        self._processes: list[ManagedProcess] = []

    def __enter__(self) -> "Launcher":
        if self._fork_server is not None:
            self._fork_server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stops everything; every process is tried even if stopping another one failed."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._scratch.cleanup)
            if self._fork_server is not None:
                stack.callback(self._fork_server.close)
            # An ExitStack runs its callbacks in reverse: the newest process stops first, the fork server last.
            for process in self._processes:
                stack.callback(process.stop)
            self._processes = []

    def start_engine(self, spec: EngineSpec, port: int | None = None) -> ManagedProcess:
        """Starts an engine and returns at once; ManagedProcess.wait_ready waits for it.

        Raises LaunchError when the port (free by default) is in use.
        """
        port = free_port() if port is None else require_free(port, f"engine {spec.name}")
        if spec.kv_port is not None and spec.role == "kv_consumer":
            for rank in range(spec.tp_size):
                require_free(spec.kv_port + rank, f"connector rank {rank} of engine {spec.name}")
        arguments = spec.arguments(port)
        environment = {**spec.environment(default_cache_dir() / "vllm"), **self._temporary}
        log_path = self.log_dir / f"{spec.name}.log"
        url = f"http://{LOOPBACK}:{port}"
        process: ManagedProcess
        if self._fork_server is None:
            process = start_child(spec.name, ["rd2h.demo.engine_main", *arguments], log_path, url=url, env=environment)
        else:
            if not self._fork_server_ready:
                self._fork_server.wait_ready(self.progress)
                self._fork_server_ready = True
            process = self._fork_server.fork(spec.name, arguments, environment, log_path, url)
        self._processes.append(process)
        return process

    def start_component(
        self, name: str, arguments: list[str], url: str | None = None, env: dict[str, str] | None = None
    ) -> ManagedProcess:
        """Starts `rd2h ARGUMENTS...` (meta service, proxy) and returns at once."""
        process = start_child(name, ["rd2h.cli", *arguments], self.log_dir / f"{name}.log", url=url, env=env)
        self._processes.append(process)
        return process

    def wait_engines(self, engines: list[ManagedProcess]) -> None:
        """Waits until all engines are ready. Raises LaunchError for the first that is not."""
        for engine in engines:
            waited_s = engine.wait_ready(READY_TIMEOUT_S, self.progress)
            self.progress(f"{engine.name} is ready" + (f" after {waited_s:.0f} s more" if waited_s >= 1 else ""))
