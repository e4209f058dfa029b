"""A real meta service as a process of its own, and clients of it."""

import asyncio
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from rd2h_client import BackgroundMetaClient, ClientOptions, EngineStatus, MetaClient
from rd2h_client.v1 import engine_registry_pb2 as er
from rd2h_client.v1 import rendezvous_pb2 as rv
from rd2h_client.v1.engine_registry_pb2_grpc import add_EngineRegistryServicer_to_server
from rd2h_client.v1.rendezvous_pb2_grpc import add_RendezvousServicer_to_server

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


class MetaProcess:
    """`rd2h meta serve`; `restart` comes back on the same port."""

    def __init__(self, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        self.address = listen
        self.start()

    @property
    def target(self) -> str:
        return f"grpc://{self.address}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "rd2h_meta.cli", "serve", "--listen", self.address, *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self._process.stdout, self._lines.put), daemon=True).start()
        threading.Thread(target=self._read, args=(self._process.stderr, self.log.append), daemon=True).start()
        self.address = self.next_line("rd2h meta: serving on ")

    def next_line(self, prefix: str) -> str:
        """The rest of the next line of output, which must begin with `prefix`."""
        try:
            line = self._lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise AssertionError(f"no line {prefix!r} from the service; log: {self.log}") from None
        assert line.startswith(prefix), (line, self.log)
        return line.removeprefix(prefix).strip()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def close(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    @staticmethod
    def _read(stream: Iterable[str], take: Callable[[str], object]) -> None:
        for line in stream:
            take(line)


def engine(engine_id: str = "d0", generation: int = 1, **changes: object) -> er.Engine:
    fields: dict[str, object] = {
        "engine_id": engine_id,
        "generation": generation,
        "role": er.ENGINE_ROLE_DECODE,
        "host": "127.0.0.1",
        "base_port": 20050,
        "tp_size": 1,
        "state": er.ENGINE_STATE_SERVING,
    }
    return er.Engine(**{**fields, **changes})


def child(request_id: str = "c0", **changes: object) -> rv.Child:
    fields: dict[str, object] = {
        "request_id": request_id,
        "token": secrets.token_bytes(16),
        "engine_id": "d0",
        "generation": 1,
        "host": "127.0.0.1",
        "base_port": 20050,
        "tp_size": 1,
    }
    return rv.Child(**{**fields, **changes})


def words(event: rv.RendezvousEvent) -> str:
    """'advertised c0', 'ended c0 FAILED', 'complete 1', 'closed DONE'."""
    name = event.WhichOneof("event")
    if name == "advertised":
        return f"advertised {event.advertised.request_id}"
    if name == "child_ended":
        outcome = rv.Outcome.Name(event.child_ended.outcome).removeprefix("OUTCOME_")
        return f"ended {event.child_ended.request_id} {outcome}"
    if name == "complete":
        return f"complete {event.complete.live_children}"
    return f"closed {rv.Outcome.Name(event.closed.outcome).removeprefix('OUTCOME_')}"


async def take(events: AsyncIterator[rv.RendezvousEvent], count: int, timeout_s: float = 10.0) -> list[str]:
    """The next `count` events in words."""
    async with asyncio.timeout(timeout_s):
        return [words(await anext(events)) for _ in range(count)]


async def take_all(events: AsyncIterator[rv.RendezvousEvent], timeout_s: float = 10.0) -> list[str]:
    """All events in words."""
    async with asyncio.timeout(timeout_s):
        return [words(event) async for event in events]


async def until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Wait until `condition` is true (it may return an awaitable)."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
        await asyncio.sleep(0.02)


def background(target: str, engine_: er.Engine, status: Callable[[], EngineStatus] = EngineStatus, **options: object
) -> BackgroundMetaClient:  # fmt: skip
    client = BackgroundMetaClient(target, ClientOptions(**options), engine_, status)  # type: ignore[arg-type]
    client.start()
    return client


@asynccontextmanager
async def in_background(
    target: str, engine_: er.Engine, status: Callable[[], EngineStatus] = EngineStatus, **options: object
) -> AsyncIterator[BackgroundMetaClient]:
    client = background(target, engine_, status, **options)
    try:
        yield client
    finally:
        assert await asyncio.to_thread(client.stop, 10.0)


async def engine_ids(client: MetaClient) -> list[str]:
    return [entry.engine_id for entry in await client.list_engines()]


@asynccontextmanager
async def serving(servicer: Any) -> AsyncIterator[str]:
    """A gRPC server of this process whose both services are ``servicer``; gives its address."""
    server = grpc.aio.server()
    add_EngineRegistryServicer_to_server(servicer, server)
    add_RendezvousServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
