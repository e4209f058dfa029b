"""X5: what Decode gives back is continued from token ids, and the client cannot tell."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from proxy_harness import Chain, Reply, chain
from proxy_lm_standin import LmDecode

Json = dict[str, Any]
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@asynccontextmanager
async def lm_chain(meta: str, *flags: str) -> AsyncIterator[tuple[Chain, LmDecode]]:
    async with chain(meta, *flags, decode_type=LmDecode) as c:
        decode = c.decode
        assert isinstance(decode, LmDecode)
        yield c, decode


def path_of(body: Json) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def both(c: Chain, decode: LmDecode, body: Json, after: int, backs: int) -> tuple[Reply, Reply]:
    """The answer without and with interruptions."""
    whole = await c.post(body, path_of(body))
    assert whole.status == 200, whole.body
    decode.bodies.clear()
    c.prefill.bodies.clear()
    decode.give_back_after, decode.give_backs = after, backs
    parts = await c.post(body, path_of(body))
    assert decode.give_backs == 0, "the case did not happen"
    await c.settled()
    return whole, parts


def merge(reply: Reply) -> dict[int, Json]:
    """Everything that the choices of a stream amount to, however it was cut into events."""
    choices: dict[int, Json] = {}
    for event in reply.events:
        if event == "[DONE]":
            continue
        for part in event["choices"]:
            have = choices.setdefault(part["index"], {"text": "", "tools": {}, "logprobs": {}, "finish": []})
            have["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
            for call in (part.get("delta") or {}).get("tool_calls") or ():
                tool = have["tools"].setdefault(call["index"], {"arguments": ""})
                tool["arguments"] += call["function"].get("arguments") or ""
                tool.update({k: v for k, v in call.items() if k in ("id", "type")})
                tool.update({k: v for k, v in call["function"].items() if k == "name"})
            for key, value in (part.get("logprobs") or {}).items():
                have["logprobs"].setdefault(key, []).extend(value)
            if part.get("finish_reason"):
                have["finish"].append((part["finish_reason"], part.get("stop_reason")))
            assert not part.get("token_ids")
            assert not part.get("prompt_token_ids")
    return choices


def usage(reply: Reply) -> Json:
    return next(event["usage"] for event in reply.events if event != "[DONE]" and not event["choices"])


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a text prompt"},
        {"prompt": list(b"a token prompt")},
        {"messages": CHAT},
        {"messages": CHAT, "logprobs": True},
        {"prompt": "a text prompt", "logprobs": 0},
    ],
    ids=["text", "tokens", "chat", "chat-logprobs", "logprobs"],
)
@pytest.mark.parametrize("backs", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 4])
async def test_the_continuation_is_exact(meta: str, body: Json, after: int, backs: int) -> None:
    async with lm_chain(meta) as (c, decode):
        if after == 0 and backs > 1:
            backs = 2
        streamed = {**body, "max_tokens": 15, "stream": True, "stream_options": {"include_usage": True}}
        whole, parts = await both(c, decode, streamed, after, backs)
        assert merge(parts) == merge(whole)
        assert usage(parts) == usage(whole)
        assert parts.body.endswith(b"data: [DONE]\n\n")
        assert len(decode.bodies) == len(c.prefill.bodies) == backs + 1
        assert all(isinstance(later["prompt"], list) for later in decode.bodies[1:])
        assert decode.bodies[1]["max_tokens"] == 15 - after

        decode.give_backs = 0
        plain = {**body, "max_tokens": 15}
        whole, parts = await both(c, decode, plain, after, backs)
        assert parts.json() == whole.json()


async def test_every_choice_of_a_list_is_continued(meta: str) -> None:
    async with lm_chain(meta) as (c, decode):
        body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 9, "stream": True}
        whole, parts = await both(c, decode, body, 3, 4)
        assert merge(parts) == merge(whole)
        assert len(merge(parts)) == 6


async def test_a_decode_engine_with_one_place_can_be_asked_again(meta: str) -> None:
    async with lm_chain(meta, "--decode-limit", "1", "--queue-s", "5") as (c, decode):
        for stream in (True, False):
            whole, parts = await both(c, decode, {"prompt": "x", "max_tokens": 9, "stream": stream}, 2, 2)
            assert parts.texts() == whole.texts()


@pytest.mark.parametrize("after", [0, 2, 3, 5, 8])
async def test_tool_calls_are_exact(meta: str, after: int) -> None:
    async with lm_chain(meta) as (c, decode):
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 12}
        backs = 1 if after > 6 else 2
        whole, parts = await both(c, decode, {**body, "stream": True}, after, backs)
        merged = merge(parts)[0]
        expected = merge(whole)[0]
        assert merged["text"] == expected["text"]
        assert merged["tools"] == expected["tools"]
        assert merged["finish"] == [("tool_calls", None)]
        assert decode.derenders[0]["chat_request"]["messages"] == CHAT
        whole, parts = await both(c, decode, body, after, backs)
        assert parts.json() == whole.json()


class Guarded(LmDecode):
    """Wants the client's key on every path, as an engine with --api-key."""

    async def _derender(self, http: web.Request) -> web.Response:
        if http.headers.get("Authorization") != "Bearer key":
            return web.Response(status=401)
        return await super()._derender(http)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_key_goes_with_every_request_of_a_continuation(meta: str, stream: bool) -> None:
    async with chain(meta, decode_type=Guarded) as c:
        assert isinstance(c.decode, Guarded)
        c.decode.give_back_after, c.decode.give_backs = 2, 1
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 12, "stream": stream}
        reply = await c.post(body, path_of(body), headers={"Authorization": "Bearer key"})
        assert reply.status == 200, reply.body
        assert b"error" not in reply.body, reply.body
        assert {headers["Authorization"] for headers in c.decode.headers} == {"Bearer key"}
        await c.settled()


class Redirecting(LmDecode):
    """Sends those who want a message made to another path."""

    async def _derender(self, http: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/v1/models"})


async def test_redirects_of_an_engine_are_not_followed(meta: str) -> None:
    async with chain(meta, decode_type=Redirecting) as c:
        assert isinstance(c.decode, Redirecting)
        c.decode.give_back_after, c.decode.give_backs = 2, 1
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 12, "stream": True}
        reply = await c.post(body, path_of(body))
        assert "derender answered 302" in reply.events[-1]["error"]["message"]
        assert c.decode.counts["models"] == 0
        await c.settled()


async def test_tool_calls_without_derender_are_a_clean_error(meta: str) -> None:
    async with lm_chain(meta) as (c, decode):
        decode.offers_derender = False
        decode.give_back_after, decode.give_backs = 2, 1
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 12, "stream": True}
        reply = await c.post(body, path_of(body))
        assert "--enable-scale-out" in reply.events[-1]["error"]["message"]
        assert b"[DONE]" not in reply.body
        await c.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("flags", "extra"),
    [(["--recompute", "off"], {}), ([], {"response_format": {"type": "json_object"}}), ([], {"echo": True})],
)
async def test_what_cannot_be_continued_is_an_error_not_a_short_answer(
    meta: str, flags: list[str], extra: Json, stream: bool
) -> None:
    async with lm_chain(meta, *flags) as (c, decode):
        body = {"prompt": "x", "max_tokens": 9, "stream": stream, **extra}
        decode.give_back_after, decode.give_backs, decode.pause_s = 4, 1, 0.02
        reply = await c.post(body)
        assert "return_token_ids" not in decode.bodies[0]
        if stream:
            assert "gave the request back" in reply.events[-1]["error"]["message"]
            assert b"[DONE]" not in reply.body
        else:
            assert reply.status == 502
        await c.settled()


async def test_without_token_ids_of_the_engine_it_is_an_error(meta: str) -> None:
    async with lm_chain(meta) as (c, decode):
        decode.give_back_after, decode.give_backs = 0, 1
        original = decode._answer

        async def forgetful(http: Any, body: Json) -> Any:
            return await original(http, {**body, "return_token_ids": False})

        decode._answer = forgetful  # type: ignore[method-assign]
        reply = await c.post({"prompt": "x", "max_tokens": 5})
        assert reply.status == 502
        assert "token ids" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"messages": CHAT}, {"messages": CHAT, "tools": TOOLS}])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_not_given_back_is_unchanged(meta: str, body: Json, stream: bool) -> None:
    async with lm_chain(meta) as (c, decode):
        full = {**body, "max_tokens": 8, "stream": stream}
        kept = await c.post(full, path_of(body))
        assert decode.bodies[0]["return_token_ids"] is True
    async with lm_chain(meta, "--recompute", "off") as (c, decode):
        passed = await c.post(full, path_of(body))
        assert "return_token_ids" not in decode.bodies[0]
    assert kept.body == passed.body


async def test_a_client_that_asks_for_token_ids_gets_them_all(meta: str) -> None:
    async with lm_chain(meta) as (c, decode):
        body = {"prompt": "x", "max_tokens": 9, "return_token_ids": True}
        whole, parts = await both(c, decode, body, 4, 1)
        assert parts.json() == whole.json()
        assert len(parts.json()["choices"][0]["token_ids"]) == 9


async def test_a_failure_while_continuing_is_a_stream_error(meta: str) -> None:
    async with lm_chain(meta) as (c, decode):
        decode.give_back_after, decode.give_backs = 4, 1
        body = {"prompt": "x", "max_tokens": 9, "stream": True}
        original = c.prefill._answer

        async def second_fails(http: Any, request: Json) -> Any:
            if c.prefill.counts["requests"] > 1:
                c.prefill.script.status = 500
            return await original(http, request)

        c.prefill._answer = second_fails  # type: ignore[method-assign]
        reply = await c.post(body)
        assert reply.events[-1]["error"]["message"] == "scripted"
        assert len(json.dumps(reply.texts()[0])) == 4 + 2
        await c.settled()


async def test_a_complete_answer_whose_continuation_fails_is_asked_for_anew(meta: str) -> None:
    async with chain(meta, prefills=2, decode_type=LmDecode) as c:
        assert isinstance(c.decode, LmDecode)
        body = {"prompt": "x", "max_tokens": 9}
        whole = await c.post(body)
        c.decode.give_back_after, c.decode.give_backs = 4, 1
        requests = 0
        for prefill in c.prefills:

            async def continuation_fails(http: Any, request: Json, answer: Any = prefill._answer) -> Any:
                nonlocal requests
                requests += 1
                return web.Response(status=500) if requests in (2, 3) else await answer(http, request)

            prefill._answer = continuation_fails  # type: ignore[method-assign]
        reply = await c.post(body)
        assert (reply.status, reply.texts()) == (200, whole.texts()), reply.body
        assert requests == 4
        await c.settled()
