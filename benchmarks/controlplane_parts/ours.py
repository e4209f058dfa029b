"""Our meta service: a waiter and an advertiser, each with the production client and its one batched stream.

One cycle is the life of a rendezvous: await, advertise, the waiter is notified, Decode withdraws the child as done, the
waiter learns that it is over. Latency runs from the call that advertises to the moment the waiter's iterator yields
the child; the rate counts whole cycles. As in production, the await is there before the advert comes (a proxy awaits
when it hands the request to Decode), and with several requests at a time neither side waits for the end of one before
it serves the next.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from multiprocessing.connection import Connection

from rd2h_client import MetaClient, MetaError
from rd2h_client.awaiting import ChildrenIterator
from rd2h_client.operations import Withdrawal
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE
from rd2h_meta.collector import settle_collector
from rd2h_meta.config import MetaConfig
from rd2h_meta.server import MetaServer

from benchmarks.controlplane_parts.payload import CHILD
from benchmarks.controlplane_parts.samples import Samples

LIFE_S = 60.0

_RUN = secrets.token_hex(8)
_numbers = itertools.count()
"""Ids as long as the random ones of production. Making those is the proxy's work, and costs a system call each here."""


def serve(pipe: Connection) -> None:
    """Run the production service until the pipe says None."""
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    server = MetaServer(MetaConfig(listen="127.0.0.1:0", grace_s=1.0))
    await server.start()
    settle_collector()
    pipe.send(server.address)
    await asyncio.to_thread(pipe.recv)
    await server.drain()


def measure(address: str, concurrency: int, duration_s: float) -> Samples:
    """Run cycles for `duration_s`, `concurrency` at a time."""
    return asyncio.run(_measure(address, concurrency, duration_s))


async def _measure(address: str, concurrency: int, duration_s: float) -> Samples:
    async with MetaClient(address) as waiter, MetaClient(address) as advertiser:
        await _run(waiter, advertiser, concurrency, duration_s / 5)  # warm connections and caches
        return await _run(waiter, advertiser, concurrency, duration_s)


async def _run(waiter: MetaClient, advertiser: MetaClient, concurrency: int, duration_s: float) -> Samples:
    samples = Samples()
    begin_s = time.perf_counter()
    until_s = begin_s + duration_s
    overlap = 2 if concurrency > 1 else 0

    async def worker() -> None:
        awaited = deque(_await(waiter) for _ in range(2))
        ending: deque[ChildrenIterator] = deque()
        while (advertised_s := time.perf_counter()) < until_s:
            rendezvous_id, events = awaited.popleft()
            _advertise(advertiser, rendezvous_id)
            first = await anext(events)
            samples.latencies_s.append(time.perf_counter() - advertised_s)
            if not first.HasField("advertised"):
                raise RuntimeError(f"expected the child first, got {first}")
            _withdraw(advertiser, rendezvous_id)
            ending.append(events)
            awaited.append(_await(waiter))
            while len(ending) > overlap:
                await _expect_done(ending.popleft())
        for events in ending:
            await _expect_done(events)
        for _, events in awaited:
            await events.aclose()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    async with asyncio.timeout(LIFE_S):
        while len(advertiser.exchange.pending):
            await asyncio.sleep(0.001)
    samples.elapsed_s = time.perf_counter() - begin_s
    return samples


async def _expect_done(events: ChildrenIterator) -> None:
    """The rendezvous has to end as done."""
    async for event in events:
        last = event
    if last.closed.outcome != OUTCOME_DONE:
        raise RuntimeError(f"expected the rendezvous to end done, got {last}")


def _await(client: MetaClient) -> tuple[str, ChildrenIterator]:
    rendezvous_id = f"{_RUN}{next(_numbers):016x}"
    return rendezvous_id, client.await_children(rendezvous_id, 1, LIFE_S)


def _advertise(client: MetaClient, rendezvous_id: str) -> None:
    now_s = time.monotonic()
    client.exchange.advertise(rendezvous_id, CHILD, now_s + LIFE_S, now_s + LIFE_S, _must_succeed, relaxed=True)
    client.kick()


def _withdraw(client: MetaClient, rendezvous_id: str) -> None:
    now_s = time.monotonic()
    withdrawal = Withdrawal(rendezvous_id, CHILD.request_id, OUTCOME_DONE, relaxed=True)
    client.exchange.end(withdrawal, now_s, now_s + LIFE_S, _must_succeed)
    client.kick()


def _must_succeed(error: MetaError | None) -> None:
    if error is not None:
        raise error
