"""Processes of the chain killed under load: every client gets an error or a closed stream in time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from proxy_harness import Process, meta_address, post, start_meta, start_standin, until

LIMIT_S = 10.0


@dataclass
class Processes:
    """A chain of real processes."""

    parts: dict[str, Process]
    meta: str
    url: str
    session: aiohttp.ClientSession


@asynccontextmanager
async def processes(p_script: dict[str, float], d_script: dict[str, float], *flags: str) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        parts: dict[str, Process] = {}
        parts["meta"] = await start_meta()
        stack.push_async_callback(lambda: parts["meta"].kill())
        meta = meta_address(parts["meta"])
        parts["prefill"], prefill = await start_standin("prefill", meta, **p_script)
        stack.push_async_callback(parts["prefill"].kill)
        parts["decode"], decode = await start_standin("decode", meta, **d_script)
        stack.push_async_callback(parts["decode"].kill)
        command = [sys.executable, "-m", "rd2h_proxy", "--port", "0", "--meta-service", f"grpc://{meta}", *flags]
        for role, address in (("prefiller", prefill), ("decoder", decode)):
            host, port = address.split(":")
            command += [f"--{role}-hosts", host, f"--{role}-ports", port]
        parts["proxy"] = await Process.start(*command, marker="rd2h proxy: serving on ")
        stack.push_async_callback(parts["proxy"].kill)
        url = parts["proxy"].ready_line.split("serving on ")[1]
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        await healthy(session, url)
        yield Processes(parts, meta, url, session)


async def healthy(session: aiohttp.ClientSession, url: str) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        async with session.get(url + "/healthcheck") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.05)
    raise AssertionError("the chain did not become healthy")


@dataclass
class Client:
    """One client under load."""

    stream: bool
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    broken: bool = False
    ended_at: float = 0.0

    async def run(self, chain: Processes, number: int) -> None:
        body = {"prompt": f"prompt {number}", "stream": self.stream}
        try:
            async with chain.session.post(chain.url + "/v1/completions", json=body) as response:
                self.status = response.status
                async for chunk in response.content.iter_any():
                    self.body += chunk
        except aiohttp.ClientError:
            self.broken = True
        self.ended_at = time.monotonic()

    @property
    def definite(self) -> bool:
        """An error status, an error event, or a connection that visibly broke."""
        return self.status >= 400 or self.broken or b'"error"' in self.body


@pytest.mark.parametrize("victim", ["prefill", "decode", "proxy"])
@pytest.mark.parametrize("phase", ["prefill", "streaming"])
async def test_kill_gives_every_client_an_error_in_time(victim: str, phase: str) -> None:
    p_script = {"delay_s": 30.0 if phase == "prefill" else 0.0}
    async with processes(p_script, {"chunks": 10_000, "delay_s": 0.02}) as chain:
        clients = [Client(stream=phase == "streaming" or number % 2 == 0) for number in range(20)]
        tasks = [asyncio.create_task(client.run(chain, number)) for number, client in enumerate(clients)]
        if phase == "streaming":
            await until(lambda: all(client.body for client in clients), "all streams have begun")
        else:
            await in_prefill(chain, len(clients))
        if victim == "prefill" and phase == "streaming":
            # Prefill has done its part: its death must not be felt.
            sizes = [len(client.body) for client in clients]
            await chain.parts["prefill"].kill()
            await until(
                lambda: all(len(c.body) > size + 500 for c, size in zip(clients, sizes, strict=True)), "streams go on"
            )
            assert not any(client.definite for client in clients)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return
        killed_at = time.monotonic()
        await chain.parts[victim].kill()
        await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
        assert all(client.definite for client in clients), [(c.status, bytes(c.body[-200:])) for c in clients]
        assert max(client.ended_at for client in clients) - killed_at < LIMIT_S


async def in_prefill(chain: Processes, count: int) -> None:
    """Waits until Prefill works on `count` requests, as the proxy reports."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        async with chain.session.get(chain.url + "/healthcheck") as response:
            engines = (await response.json())["engines"]
        if engines["prefill"][0]["in_flight"] == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the requests did not reach Prefill")


async def test_meta_service_killed_leaves_streams_alone_and_new_requests_wait_for_it() -> None:
    async with processes({}, {"chunks": 150, "delay_s": 0.02}) as chain:
        clients = [Client(stream=True) for _ in range(10)]
        tasks = [asyncio.create_task(client.run(chain, number)) for number, client in enumerate(clients)]
        await until(lambda: all(client.body for client in clients), "all streams have begun")
        await chain.parts["meta"].kill()
        waiting = [asyncio.create_task(post(chain.session, chain.url + "/v1/completions", {"prompt": "new"}))]
        await asyncio.gather(*tasks)
        assert all(client.body.endswith(b"data: [DONE]\n\n") for client in clients)
        assert not waiting[0].done()
        chain.parts["meta"] = await start_meta(chain.meta)
        reply = await asyncio.wait_for(waiting[0], LIMIT_S + 5)
        assert reply.status == 200, reply.body
        assert (await post(chain.session, chain.url + "/v1/completions", {"prompt": "again"})).status == 200


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_meta_service_that_stays_away_is_503_in_time(moment: str) -> None:
    script: dict[str, float] = {"silent": True} if moment == "during" else {}
    async with processes({}, script) as chain:
        url = chain.url + "/v1/completions"
        started = time.monotonic()
        if moment == "during":
            task = asyncio.create_task(post(chain.session, url, {"prompt": "x", "stream": True}))
            await in_decode(chain)
            await chain.parts["meta"].kill()
            started = time.monotonic()
            reply = await task
        else:
            await chain.parts["meta"].kill()
            started = time.monotonic()
            reply = await post(chain.session, url, {"prompt": "x", "stream": True})
        assert time.monotonic() - started < LIMIT_S
        assert reply.status == 503, reply.body
        assert int(reply.headers["Retry-After"]) >= 1
        async with chain.session.get(chain.url + "/healthcheck") as response:
            assert response.status == 503
            assert (await response.json())["meta_service_connected"] is False


async def in_decode(chain: Processes) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        async with chain.session.get(chain.url + "/healthcheck") as response:
            engines = (await response.json())["engines"]
        if engines["decode"][0]["in_flight"] == 1:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the request did not reach Decode")


async def test_engines_come_back_without_restarting_the_proxy() -> None:
    async with processes({}, {}) as chain:
        url = chain.url + "/v1/completions"
        assert (await post(chain.session, url, {"prompt": "x"})).status == 200
        await chain.parts["decode"].kill()
        reply = await post(chain.session, url, {"prompt": "x"})
        assert reply.status in (502, 503)
        port = chain.parts["decode"].ready_line.split()[1]
        chain.parts["decode"], _ = await start_standin("decode", chain.meta, port=int(port))
        try:
            await healthy(chain.session, chain.url)
            assert (await post(chain.session, url, {"prompt": "x"})).status == 200
        finally:
            await chain.parts["decode"].kill()


async def test_sigterm_lets_streams_finish() -> None:
    async with processes({}, {"chunks": 60, "delay_s": 0.02}) as chain:
        client = Client(stream=True)
        task = asyncio.create_task(client.run(chain, 0))
        await until(lambda: bool(client.body), "the stream has begun")
        stopping = asyncio.create_task(chain.parts["proxy"].terminate())
        await task
        assert client.body.endswith(b"data: [DONE]\n\n")
        assert await stopping == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefiller-hosts", "a", "--prefiller-ports", "1", "2"], "1 hosts and 2 ports"),
        (["--meta-service", "http://x:1"], "--meta-service"),
    ],
)
async def test_bad_settings_are_one_line(flags: list[str], message: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rd2h_proxy", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert message in errors.decode()
    assert len(errors.decode().strip().splitlines()) == 1
