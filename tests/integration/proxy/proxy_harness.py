"""A whole chain on loopback: real meta service, stand-in engines, and the proxy in this process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from proxy_standins import DecodeStandIn, PrefillStandIn
from rd2h_client.client import MetaClient
from rd2h_proxy import config as proxy_config
from rd2h_proxy.service import RunningProxy, running

DEADLINE_S = 20.0
META_COMMAND = ("-m", "rd2h_meta.cli", "serve")


async def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Waits for a condition, or fails naming it."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.01)


@dataclass
class Process:
    """A child process that printed one line when it was ready."""

    process: asyncio.subprocess.Process
    ready_line: str
    command: tuple[str, ...]

    @classmethod
    async def start(cls, *command: str, marker: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ)
        )
        assert process.stdout is not None
        seen = b""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while line := await process.stdout.readline():
                    seen += line
                    if marker in line.decode():
                        started = cls(process, line.decode().strip(), command)
                        started._drain = asyncio.create_task(started._read_rest())
                        return started
        except TimeoutError:
            pass
        await cls(process, "", command).kill()
        raise AssertionError(f"{' '.join(command)} did not print {marker!r} but {seen.decode()!r}")

    async def _read_rest(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.output.append(line.decode())

    output: list[str] = field(default_factory=list)
    _drain: asyncio.Task[None] | None = None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        if self._drain is not None:
            await self._drain

    async def terminate(self) -> int:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


async def start_meta(listen: str = "127.0.0.1:0") -> Process:
    """A meta service process."""
    return await Process.start(sys.executable, *META_COMMAND, "--listen", listen, marker="rd2h meta: serving on")


def meta_address(process: Process) -> str:
    """host:port out of the ready line."""
    return process.ready_line.split("serving on ")[1].split()[0].removeprefix("grpc://")


async def start_standin(role: str, meta: str, port: int = 0, **script: Any) -> tuple[Process, str]:
    """A stand-in engine as a process, and its address."""
    program = str(Path(__file__).with_name("proxy_standin_process.py"))
    process = await Process.start(
        *(sys.executable, program, role, "--meta", meta, "--port", str(port), "--script", json.dumps(script)),
        marker="ready ",
    )
    return process, "127.0.0.1:" + process.ready_line.split()[1]


def make_config(meta: str, prefill: list[str], decode: list[str], *flags: str) -> proxy_config.ProxyConfig:
    """Proxy settings from a command line, as an operator gives it."""
    line = ["--port", "0", "--meta-service", f"grpc://{meta}"]
    for role, addresses in (("prefiller", prefill), ("decoder", decode)):
        if addresses:
            line += [f"--{role}-hosts", *(address.rsplit(":", 1)[0] for address in addresses)]
            line += [f"--{role}-ports", *(address.rsplit(":", 1)[1] for address in addresses)]
    parser = argparse.ArgumentParser()
    proxy_config.add_arguments(parser)
    return proxy_config.config_from(parser.parse_args([*line, *flags]))


@dataclass
class Chain:
    """What a test talks to."""

    proxy: RunningProxy
    prefills: list[PrefillStandIn]
    decodes: list[DecodeStandIn]
    session: aiohttp.ClientSession
    meta: str

    @property
    def prefill(self) -> PrefillStandIn:
        return self.prefills[0]

    @property
    def decode(self) -> DecodeStandIn:
        return self.decodes[0]

    @property
    def url(self) -> str:
        return f"http://{self.proxy.address}"

    async def post(self, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> Reply:
        """Sends a request and reads the whole answer."""
        return await post(self.session, self.url + path, body, **options)

    def idle(self) -> bool:
        """Whether nothing of any request is left in the proxy and the engines."""
        router = self.proxy.router
        targets = [*router.prefill.targets, *router.decode.targets]
        return (
            all(target.in_flight == 0 and target.work_tokens == 0 for target in targets)
            and not self.proxy.journal.in_flight
            and router.prefill.waiting == router.decode.waiting == 0
            and router.bodies.used == router.passing.used == 0
            and len(router.background) == 0
            and all(engine.active == 0 for engine in [*self.prefills, *self.decodes])
            and all(decode.held == 0 and not decode.slots for decode in self.decodes)
        )

    async def settled(self) -> None:
        """Waits until everything has been given back."""
        await until(self.idle, f"everything given back; {self.proxy.journal.in_flight}")
        assert self.proxy.router.background.failed == self.proxy.router.background.dropped == 0


@dataclass
class Reply:
    """A complete answer, or how it broke."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    broken: str = ""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of every event; [DONE] stays text."""
        data = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def texts(self) -> dict[int, str]:
        """Text of every choice."""
        texts: dict[int, str] = {}
        if self.headers.get("Content-Type", "").startswith("text/event-stream"):
            for event in self.events:
                for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            return texts
        for choice in self.json()["choices"]:
            texts[choice["index"]] = choice["text"] if "text" in choice else choice["message"]["content"]
        return texts


async def post(session: aiohttp.ClientSession, url: str, body: Any, **options: Any) -> Reply:
    """One POST, read to the end."""
    async with session.post(url, json=body, **options) as response:
        received = bytearray()
        broken = ""
        try:
            async for chunk in response.content.iter_any():
                received += chunk
        except aiohttp.ClientError as error:
            broken = repr(error)
        return Reply(response.status, response.headers, bytes(received), broken)


@asynccontextmanager
async def chain(
    meta: str,
    *flags: str,
    prefills: int = 1,
    decodes: int = 1,
    decode_type: type[DecodeStandIn] = DecodeStandIn,
    grace_s: float = 5.0,
) -> AsyncIterator[Chain]:
    """Engines and proxy on top of a running meta service. `grace_s`: AttemptLimits.child_failed_grace_s."""
    async with AsyncExitStack() as stack:
        ps = [PrefillStandIn() for _ in range(prefills)]
        ds = []
        for number in range(decodes):
            advertiser = await stack.enter_async_context(MetaClient(meta))
            ds.append(decode_type(meta=advertiser, engine_id=f"decode-{number}"))
        for engine in [*ps, *ds]:
            await engine.start()
            stack.push_async_callback(engine.stop)
        config = make_config(meta, [p.address for p in ps], [d.address for d in ds], *flags)
        config = dataclasses.replace(config, attempt=dataclasses.replace(config.attempt, child_failed_grace_s=grace_s))
        client = await stack.enter_async_context(MetaClient(meta))
        proxy = await stack.enter_async_context(running(config, client))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60))
        )
        yield Chain(proxy, ps, ds, session, meta)
