"""Server errors that a request brings about itself keep nobody else from the engines; those of an ill engine do."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_harness import Chain, chain
from proxy_standins import StandIn
from rd2h_proxy.breaker import BreakerState

PICTURE = {"type": "image_url", "image_url": {"url": "http://example.invalid/picture"}}
CHATS: dict[str, Any] = {
    "picture": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "text": {"messages": [{"role": "user", "content": "x"}]},
    "whole": {"prompt": "x", "prompt_logprobs": 1},
}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def breakers(c: Chain, engines: list[Any]) -> list[BreakerState]:
    found: list[BreakerState] = []
    for engine in engines:
        pool = c.proxy.router.decode if engine in c.decodes else c.proxy.router.prefill
        target = pool.get(engine.address)
        assert target is not None
        found.append(target.breaker.state)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(
    ("kind", "role"), [("picture", "decode"), ("picture", "prefill"), ("text", "decode"), ("whole", "prefill")]
)
async def test_a_request_that_fails_everywhere_closes_no_engine(
    meta: str, kind: str, role: str, engines: int, stream: bool
) -> None:
    async with chain(meta, prefills=engines, decodes=engines) as c:
        failing: list[StandIn] = [*c.decodes] if role == "decode" else [*c.prefills]
        for engine in failing:
            engine.script.status, engine.whole_fails = 500, True
        body = {**CHATS[kind], "stream": stream}
        for _ in range(5):
            reply = await c.post(body, path_of(body))
            assert reply.status == 500
            assert reply.json()["error"]["message"] == "scripted"
        assert set(breakers(c, [*c.prefills, *c.decodes])) == {BreakerState.CLOSED}
        for engine in failing:
            engine.script.status = 200
        assert (await c.post({"prompt": "others"})).status == 200
        await c.settled()


@pytest.mark.parametrize(("kind", "role"), [("text", "decode"), ("whole", "prefill")])
async def test_an_engine_that_fails_what_another_serves_is_closed(meta: str, kind: str, role: str) -> None:
    async with chain(meta, prefills=2, decodes=2) as c:
        ill: StandIn = c.decode if role == "decode" else c.prefill
        ill.script.status, ill.whole_fails = 500, True
        for _ in range(6):
            assert (await c.post(CHATS[kind], path_of(CHATS[kind]))).status == 200
        assert breakers(c, [ill]) == [BreakerState.OPEN]
        assert breakers(c, [*c.prefills, *c.decodes]).count(BreakerState.OPEN) == 1
        await c.settled()


async def test_a_server_error_in_the_work_itself_is_held_against_the_only_engine(meta: str) -> None:
    async with chain(meta) as c:
        c.decode.script.error_event = True
        for _ in range(3):
            assert (await c.post({"prompt": "x"})).status == 500
        assert breakers(c, [c.decode]) == [BreakerState.OPEN]
        await c.settled()


@pytest.mark.parametrize("how", ["drop", "503"])
async def test_a_dropped_connection_is_held_against_an_engine_whatever_was_asked(meta: str, how: str) -> None:
    async with chain(meta) as c:
        c.decode.script.drop = how == "drop"
        c.decode.script.status = 503 if how == "503" else 200
        for _ in range(3):
            assert (await c.post(CHATS["picture"], path_of(CHATS["picture"]))).status in (502, 503)
        assert breakers(c, [c.decode]) == [BreakerState.OPEN if how == "drop" else BreakerState.CLOSED]
        await c.settled()
