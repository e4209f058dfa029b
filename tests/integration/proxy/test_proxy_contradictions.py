"""Ends of a rendezvous, or of its children, that neither the proxy nor Decode has said: a definite answer, and soon."""

from __future__ import annotations

import asyncio
import time

import pytest
from proxy_harness import Chain, chain, until
from proxy_standins import text_of
from rd2h_client.client import MetaClient
from rd2h_client.v1.rendezvous_pb2 import Outcome
from rd2h_proxy.breaker import BreakerState

GRACE_S = 0.5
SOON_S = 4.0
DONE, ABORTED = Outcome.OUTCOME_DONE, Outcome.OUTCOME_ABORTED


def rendezvous_id(c: Chain) -> str:
    return str(c.decode.bodies[-1]["kv_transfer_params"]["rendezvous_id"])


def blamed(c: Chain) -> list[str]:
    """Engines whose breakers have counted a failure."""
    targets = [*c.proxy.router.prefill.targets, *c.proxy.router.decode.targets]
    return [t.address for t in targets if t.breaker.state is not BreakerState.CLOSED or t.breaker.failures]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("outcome", [DONE, ABORTED])
@pytest.mark.parametrize("when", ["before an advert", "before all adverts", "while Prefill works"])
async def test_a_rendezvous_ended_by_an_outsider_is_a_503_that_blames_no_engine(
    meta: str, when: str, outcome: Outcome, stream: bool
) -> None:
    async with chain(meta, "--retries", "0", grace_s=GRACE_S) as c, MetaClient(meta) as outsider:
        c.decode.script.silent = when == "before an advert"
        if when == "before all adverts":
            c.decode.script.capacity = 1
        c.prefill.gate = asyncio.Event()
        request = asyncio.create_task(c.post({"prompt": ["x", "y"], "stream": stream}))
        if when == "before an advert":
            await until(lambda: c.decode.active == 1, "Decode has the request")
        elif when == "before all adverts":
            await until(lambda: c.decode.held == 1, "Decode holds a child")
        else:
            await until(lambda: c.prefill.active == 1, "Prefill works")
        await outsider.cancel(rendezvous_id(c), "no longer wanted", outcome=outcome)
        began = time.monotonic()
        reply = await request
        assert time.monotonic() - began < SOON_S
        assert reply.status == 503, reply.body
        assert reply.headers["Retry-After"]
        assert "no longer wanted" in reply.json()["error"]["message"]
        assert blamed(c) == []
        await c.settled()


async def test_a_request_whose_rendezvous_an_outsider_ended_is_tried_again(meta: str) -> None:
    async with chain(meta, grace_s=GRACE_S) as c, MetaClient(meta) as outsider:
        c.prefill.gate = asyncio.Event()
        request = asyncio.create_task(c.post({"prompt": "x"}))
        await until(lambda: c.prefill.active == 1, "Prefill works")
        first = rendezvous_id(c)
        await outsider.cancel(first, "no longer wanted", outcome=DONE)
        await until(lambda: rendezvous_id(c) != first, "another attempt")
        c.prefill.gate.set()
        reply = await request
        assert reply.texts() == {0: "".join(text_of("x", 0, index) for index in range(4))}
        await c.settled()


async def test_a_child_said_to_be_served_before_prefill_was_asked_ends_the_request(meta: str) -> None:
    flags = ("--retries", "0", "--gather-window-s", "30")
    async with chain(meta, *flags, grace_s=GRACE_S) as c, MetaClient(meta) as outsider:
        c.decode.script.capacity = 1
        events = []
        request = asyncio.create_task(c.post({"prompt": ["x", "y"]}))
        await until(lambda: c.decode.held == 1, "Decode holds a child")
        async for event in outsider.await_children(rendezvous_id(c), 2, 60):
            events.append(event)
            break
        child = events[0].advertised
        await outsider.withdraw(rendezvous_id(c), child.request_id, DONE, "served", 0, 0)
        began = time.monotonic()
        reply = await request
        assert time.monotonic() - began < SOON_S
        assert reply.status == 503, reply.body
        assert c.prefill.counts["requests"] == 0
        await c.settled()


async def test_an_end_from_outside_after_the_answer_began_ends_the_stream_when_children_are_missing(meta: str) -> None:
    async with chain(meta, grace_s=GRACE_S) as c, MetaClient(meta) as outsider:
        c.decode.script.capacity, c.decode.script.chunks, c.decode.script.delay_s = 1, 400, 0.05
        async with c.session.post(c.url + "/v1/completions", json={"prompt": ["x", "y"], "stream": True}) as response:
            await response.content.readany()
            await outsider.cancel(rendezvous_id(c), "no longer wanted", outcome=DONE)
            async with asyncio.timeout(SOON_S):
                rest = await response.content.read()
        assert b'"error"' in rest.rsplit(b"data: ", 1)[-1]
        assert b"no longer wanted" in rest
        assert b"[DONE]" not in rest
        await c.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_r4_an_aborted_child_does_not_cut_its_sibling_however_long_that_takes(meta: str, stream: bool) -> None:
    async with chain(meta, grace_s=GRACE_S) as c:
        c.decode.script.abort_children = frozenset({(0, 0)})
        c.decode.script.chunks, c.decode.script.delay_s = 8, 4 * GRACE_S / 8
        reply = await c.post({"prompt": ["x", "y"], "stream": stream})
        assert reply.status == 200, reply.body
        assert reply.texts()[1] == "".join(text_of("y", 0, index) for index in range(8))
        await c.settled()
