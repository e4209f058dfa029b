"""X6: chats with pictures. The proxy looks at none of them, and however large they are nothing is counted as text."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from proxy_harness import chain, until
from proxy_standins import text_of
from rd2h_proxy.phase import Phase

CHAT = "/v1/chat/completions"
MIB = 1 << 20


def picture(size_bytes: int, seed: int = 0) -> dict[str, Any]:
    """A part with a data: URL of incompressible bytes; what they show is the engines' business."""
    content = base64.b64encode(random.Random(seed).randbytes(size_bytes)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}", "detail": "auto"}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "What is in it?"}
    return {"messages": [{"role": "user", "content": [text, *parts, {"type": "text", "text": "Say."}]}], **fields}


def told(body: dict[str, Any], choice: int = 0) -> str:
    return "".join(text_of(json.dumps(body["messages"]), choice, index) for index in range(4))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        [picture(100)],
        [picture(6 * MIB)],
        [picture(2 * MIB, seed) for seed in range(3)],
        [{"type": "image_url", "image_url": {"url": "https://example.com/a?b=c&d=\u96ea"}}, picture(1000)],
        [{"type": "image_url", "image_url": None, "uuid": "known to the engine"}],
        [{"image_url": "data:,"}, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    ],
    ids=["small", "6 MiB", "three of 2 MiB", "remote", "by uuid", "untyped and sound"],
)
async def test_both_legs_get_it_unchanged(meta: str, parts: list[Any], stream: bool) -> None:
    async with chain(meta) as c:
        body = chat(*parts, stream=stream, mm_processor_kwargs={"num_crops": 4}, media_io_kwargs={"image": {}})
        reply = await c.post(body, CHAT)
        assert reply.status == 200, reply.body
        assert reply.texts() == {0: told(body)}
        for leg in (c.decode.bodies[0], c.prefill.bodies[0]):
            for key in ("messages", "mm_processor_kwargs", "media_io_kwargs"):
                assert leg[key] == body[key]
        assert c.decode.counts["kv-refused"] == 0
        await c.settled()


async def test_every_choice_of_a_picture_chat(meta: str) -> None:
    async with chain(meta) as c:
        body = chat(picture(MIB), n=3)
        assert (await c.post(body, CHAT)).texts() == {choice: told(body, choice) for choice in range(3)}
        assert c.prefill.counts["requests"] == 1
        await c.settled()


async def test_work_is_estimated_by_pictures_and_then_known_from_decode(meta: str) -> None:
    async with chain(meta) as c:
        (decode,), (prefill,) = c.proxy.router.decode.targets, c.proxy.router.prefill.targets
        c.decode.script.silent = True
        request = asyncio.create_task(c.post(chat(picture(4 * MIB), max_tokens=100), CHAT))
        await until(lambda: decode.in_flight == 1, "Decode has the request")
        assert 1100 < decode.work_tokens < 1150
        request.cancel()
        await c.settled()
        c.decode.script.silent, c.decode.script.prompt_tokens = False, 2345
        c.prefill.gate = asyncio.Event()
        ratio = c.proxy.router.ratio.bytes_per_token
        request = asyncio.create_task(c.post(chat(picture(4 * MIB), max_tokens=100, n=2), CHAT))
        await until(lambda: c.prefill.active == 1, "Prefill has the request")
        assert decode.work_tokens == 2345 + 2 * 100
        assert prefill.work_tokens == 2345
        c.prefill.gate.set()
        assert (await request).status == 200
        assert c.proxy.router.ratio.bytes_per_token == ratio
        await c.settled()


async def in_pieces(raw: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), 1 << 16):
        yield raw[start : start + (1 << 16)]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length given", "chunked"])
async def test_a_body_over_the_limit_is_413_and_says_so(meta: str, path: str, chunked: bool) -> None:
    async with chain(meta, "--max-body-mib", "1") as c:
        raw = json.dumps(chat(picture(12 * MIB))).encode()
        headers = {"Content-Type": "application/json"}
        async with c.session.post(c.url + path, data=in_pieces(raw) if chunked else raw, headers=headers) as response:
            assert response.status == 413
            error = (await response.json())["error"]
        assert error["code"] == 413
        assert str(MIB) in error["message"]
        assert c.decode.counts["requests"] == c.prefill.counts["requests"] == len(c.decode.tokenized) == 0
        body = chat(picture(MIB // 2))
        assert (await c.post(body, CHAT)).texts() == {0: told(body)}
        await c.settled()


async def test_a_body_that_is_cut_in_the_picture_is_a_refusal(meta: str) -> None:
    async with chain(meta) as c:
        raw = json.dumps(chat(picture(MIB))).encode()[: MIB // 2]
        async with c.session.post(c.url + CHAT, data=raw, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
        assert "not valid JSON" in message
        assert len(message) < 500
        await c.settled()


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_that_decode_refuses_is_refused_in_its_words(meta: str, status: int, stream: bool) -> None:
    async with chain(meta, decodes=2) as c:
        words = json.dumps({"error": {"message": "At most 0 image(s) may be provided", "code": status}})
        for decode in c.decodes:
            decode.script.status, decode.script.body = status, words
        reply = await c.post(chat(picture(2 * MIB), stream=stream), CHAT)
        assert (reply.status, reply.body.decode()) == (status, words)
        assert sum(decode.counts["requests"] for decode in c.decodes) == 1
        assert c.prefill.counts["requests"] == 0
        await c.settled()
        assert c.proxy.journal.outcomes == {Phase.FAILED: 1}


async def test_tokenize_is_passed_through_byte_for_byte(meta: str) -> None:
    async with chain(meta) as c:
        raw = json.dumps(chat(picture(5 * MIB)), indent=1).encode()
        headers = {"Content-Type": "application/json"}
        async with c.session.post(c.url + "/tokenize", data=raw, headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["count"] > 5 * MIB
        assert c.decode.tokenized == [raw]


async def test_a_client_that_leaves_in_the_middle_of_a_picture(meta: str) -> None:
    async with chain(meta) as c:
        raw = json.dumps(chat(picture(4 * MIB))).encode()
        host, port = c.proxy.address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        writer.write(head.encode() + raw[: 2 * MIB])
        await until(lambda: bool(c.proxy.journal.in_flight), "the proxy reads")
        writer.close()
        await c.settled()
        assert c.decode.counts["requests"] == c.prefill.counts["requests"] == 0
        assert c.proxy.journal.outcomes == {Phase.ABORTED: 1}
