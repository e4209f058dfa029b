"""Engines that send what is no answer: the client gets a status or an error event, never a cut or a 500 of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from proxy_harness import chain
from proxy_lm_standin import LmDecode
from proxy_standins import DecodeStandIn

GOOD = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null,"token_ids":[1],"prompt_token_ids":[1]}]}\n\n'
NONSENSE = [
    b'data: {"choices":[5]}\n\n',
    b'data: {"choices":7}\n\n',
    b'data: {"choices":[{"index":[1],"text":"a"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":7}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"a","token_ids":[-1]}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"a","token_ids":["x"]}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[1]}}]}\n\n',
    b'data: {"a":' + b"[" * 5000 + b"\n\n",
]


@dataclass
class Nonsense(DecodeStandIn):
    """Streams what it is told to."""

    events: tuple[bytes, ...] = ()

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in self.events:
            await response.write(event)
        await response.write_eof()
        return response


@dataclass
class Complete(DecodeStandIn):
    """Answers at once with what it is told to."""

    answer: bytes = b""

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=self.answer, content_type="application/json")


@pytest.mark.parametrize("event", NONSENSE)
async def test_nonsense_first_is_a_proper_status(meta: str, event: bytes) -> None:
    async with chain(meta, "--recompute", "on", "--retries", "0", decode_type=Nonsense) as c:
        assert isinstance(c.decode, Nonsense)
        c.decode.events = (event,)
        reply = await c.post({"prompt": "x", "stream": True})
        assert reply.status == 502, reply.body
        assert c.decode.address in reply.json()["error"]["message"]
        await c.settled()


@pytest.mark.parametrize("event", NONSENSE)
async def test_nonsense_after_text_is_an_error_event(meta: str, event: bytes) -> None:
    async with chain(meta, "--recompute", "on", decode_type=Nonsense) as c:
        assert isinstance(c.decode, Nonsense)
        c.decode.events = (GOOD * 3000, event)
        reply = await c.post({"prompt": "x", "stream": True})
        assert reply.status == 200
        assert not reply.broken
        assert c.decode.address in reply.events[-1]["error"]["message"]
        assert b"[DONE]" not in reply.body
        await c.settled()


async def test_an_error_event_that_is_too_deep_to_read_is_502(meta: str) -> None:
    async with chain(meta, "--retries", "0", decode_type=Nonsense) as c:
        assert isinstance(c.decode, Nonsense)
        c.decode.events = (b'data: {"error":' + b"[" * 5000 + b"\n\n",)
        assert (await c.post({"prompt": "x", "stream": True})).status == 502
        await c.settled()


@dataclass
class NonsenseInContinuation(LmDecode):
    """Gives a request back, and answers the continuation with nonsense."""

    event: bytes = b""

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.counts["requests"] == 1:
            return await super()._answer(http, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(self.event)
        await response.write_eof()
        return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("event", NONSENSE)
async def test_nonsense_in_a_continuation_is_an_error_of_that_engine(meta: str, event: bytes, stream: bool) -> None:
    async with chain(meta, "--retries", "0", decode_type=NonsenseInContinuation) as c:
        assert isinstance(c.decode, NonsenseInContinuation)
        c.decode.give_back_after, c.decode.give_backs, c.decode.event = 4, 1, event
        reply = await c.post({"prompt": "x", "max_tokens": 9, "stream": stream})
        error = reply.events[-1] if stream else reply.json()
        assert reply.status == (200 if stream else 502)
        assert not reply.broken
        assert "error" in error
        assert b"[DONE]" not in reply.body
        await c.settled()


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices": [5], "x": "recomputed"}',
        b'{"choices": 7, "x": "recomputed"}',
        b'["recomputed"]',
        b"recomputed",
        b'{"choices": [{"index": 0, "stop_reason": "recomputed", "token_ids": ["x"]}]}',
    ],
)
async def test_a_complete_answer_of_nonsense_is_502(meta: str, answer: bytes) -> None:
    async with chain(meta, "--recompute", "on", "--retries", "0", decode_type=Complete) as c:
        assert isinstance(c.decode, Complete)
        c.decode.answer = answer
        reply = await c.post({"prompt": "x"})
        assert reply.status == 502, reply.body
        assert c.decode.address in reply.json()["error"]["message"]
        await c.settled()
