"""Mixed traffic with disconnects and engines killed and restarted: a definite answer for everyone, nothing leaked."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from proxy_harness import Process, make_config, meta_address, start_meta, start_standin, until
from rd2h_client.client import MetaClient
from rd2h_proxy.service import RunningProxy, running

Json = dict[str, Any]


@dataclass
class Engine:
    """A stand-in process that can be killed and comes back at its address."""

    role: str
    meta: str
    process: Process
    address: str
    script: Json

    @classmethod
    async def start(cls, role: str, meta: str, **script: Any) -> Engine:
        process, address = await start_standin(role, meta, **script)
        return cls(role, meta, process, address, script)

    async def restart(self) -> None:
        await self.process.kill()
        port = int(self.address.split(":")[1])
        self.process, _ = await start_standin(self.role, self.meta, port, **self.script)


@dataclass
class Traffic:
    """What clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def one(self, session: aiohttp.ClientSession, url: str, number: int, rng: random.Random) -> None:
        """One request of a random kind; every tenth client goes away in the middle."""
        body, path = random_body(number, rng)
        leaves = rng.random() < 0.1
        patience_s = rng.uniform(0.0, 0.08) if leaves else 45.0
        try:
            async with asyncio.timeout(patience_s), session.post(url + path, json=body) as response:
                received = await response.read()
        except TimeoutError:
            if not leaves:
                self.wrong.append(f"request {number} had no answer in {patience_s} s")
            self.outcomes["left"] += 1
            return
        except aiohttp.ClientError as error:
            self.wrong.append(f"request {number}: {error!r}")
            return
        self._judge(number, body, response.status, received)

    def _judge(self, number: int, body: Json, status: int, received: bytes) -> None:
        if not received:
            self.wrong.append(f"request {number}: {status} with an empty body")
        elif status != 200:
            self.outcomes[f"status {status}"] += 1
            if status not in (429, 500, 502, 503, 504):
                self.wrong.append(f"request {number}: {status} {received[:200]!r}")
        elif not body["stream"]:
            self.outcomes["complete"] += 1
        elif received.endswith(b"data: [DONE]\n\n"):
            self.outcomes["streamed"] += 1
        elif b'"error"' in received.split(b"\n\n")[-2]:
            self.outcomes["stream error"] += 1
        else:
            self.wrong.append(f"request {number}: a stream that just ends: {received[-200:]!r}")


def random_body(number: int, rng: random.Random) -> tuple[Json, str]:
    stream = rng.random() < 0.6
    kind = rng.randrange(4)
    if kind == 0:
        messages = [{"role": "user", "content": f"question {number}"}]
        return {"messages": messages, "n": rng.choice([1, 2]), "stream": stream}, "/v1/chat/completions"
    if kind == 1:
        prompts = [f"{number} {index}" for index in range(rng.randint(2, 4))]
        return {"prompt": prompts, "n": rng.choice([1, 2]), "stream": stream}, "/v1/completions"
    return {"prompt": f"prompt {number}", "stream": stream}, "/v1/completions"


@asynccontextmanager
async def world(stack: AsyncExitStack) -> AsyncIterator[tuple[RunningProxy, list[Engine], str]]:
    meta_process = await start_meta()
    stack.push_async_callback(meta_process.kill)
    meta = meta_address(meta_process)
    engines = []
    for role, script in (("prefill", {"delay_s": 0.005}), ("decode", {"delay_s": 0.005, "chunks": 6, "capacity": 40})):
        for _ in range(2):
            engine = await Engine.start(role, meta, **script)
            engines.append(engine)
            stack.push_async_callback(lambda engine=engine: engine.process.kill())
    client = await stack.enter_async_context(MetaClient(meta))
    addresses = {role: [e.address for e in engines if e.role == role] for role in ("prefill", "decode")}
    config = make_config(meta, addresses["prefill"], addresses["decode"], "--max-waiting", "200", "--queue-s", "10")
    async with running(config, client) as proxy:
        yield proxy, engines, f"http://{proxy.address}"


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def proxy_is_idle(proxy: RunningProxy) -> Callable[[], bool]:
    router = proxy.router
    targets = [*router.prefill.targets, *router.decode.targets]
    return lambda: (
        not proxy.journal.in_flight
        and all(target.in_flight == target.work_tokens == 0 for target in targets)
        and router.prefill.waiting == router.decode.waiting == len(router.background) == 0
    )


@pytest.mark.parametrize(
    "requests", [pytest.param(400, id="short"), pytest.param(2000, id="full", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(300)
async def test_soak(requests: int) -> None:
    rng = random.Random(7)
    traffic = Traffic()
    async with AsyncExitStack() as stack, world(stack) as (proxy, engines, url), aiohttp.ClientSession() as session:
        await traffic.one(session, url, 0, random.Random(1))
        await until(proxy_is_idle(proxy), "idle after the first request")
        tasks_before, sockets_before = len(asyncio.all_tasks()), sockets()
        places = asyncio.Semaphore(32)

        async def limited(number: int) -> None:
            async with places:
                await traffic.one(session, url, number, rng)

        load = [asyncio.create_task(limited(number)) for number in range(1, requests)]
        for round_number, engine in enumerate(engines, start=1):
            share = requests * round_number // (len(engines) + 1)
            await until(lambda share=share: sum(task.done() for task in load) >= share, f"{share} done", 120)
            await engine.restart()
        await asyncio.gather(*load)
        assert traffic.wrong == []
        assert sum(traffic.outcomes.values()) == requests
        good = traffic.outcomes["complete"] + traffic.outcomes["streamed"]
        assert good > requests * 0.6, traffic.outcomes
        assert traffic.outcomes["left"] > requests * 0.03
        await until(proxy_is_idle(proxy), f"all counters back to zero; {proxy.journal.in_flight}")
        await session.close()
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before + 2, "no task leaked")
        # Idle connections to engines are closed after a few seconds.
        await until(lambda: sockets() <= sockets_before + 4, f"no socket leaked ({sockets()}, {sockets_before})")
