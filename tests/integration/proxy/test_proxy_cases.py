"""Field cases of the proxy (X1-X4, X7 and parts of R3-R5), each with real HTTP and the real meta service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from proxy_harness import Chain, chain, until
from proxy_standins import text_of
from rd2h_proxy.breaker import BreakerState
from rd2h_proxy.phase import Phase


def answer(prompt: str, choice: int = 0, chunks: int = 4) -> str:
    return "".join(text_of(prompt, choice, index) for index in range(chunks))


@pytest.mark.parametrize("stream", [False, True])
async def test_one_completion(meta: str, stream: bool) -> None:
    async with chain(meta) as c:
        reply = await c.post({"prompt": "hello", "stream": stream})
        assert reply.status == 200, reply.body
        assert reply.texts() == {0: answer("hello")}
        assert c.prefill.counts["kv-200"] == 1
        d_body, p_body = c.decode.bodies[0], c.prefill.bodies[0]
        assert d_body["kv_transfer_params"]["metaserver"] == f"grpc://{c.meta}"
        assert p_body["stream"] is False
        assert p_body["max_tokens"] == 1
        base = d_body["kv_transfer_params"]["x_request_id"]
        assert c.decode.headers[0]["X-Request-Id"] == c.prefill.headers[0]["X-Request-Id"] == base
        await c.settled()
        assert c.proxy.journal.outcomes == {Phase.DONE: 1}


async def test_stream_is_passed_byte_for_byte(meta: str) -> None:
    async with chain(meta) as c:
        reply = await c.post({"prompt": "hello", "stream": True})
        base = c.decode.bodies[0]["kv_transfer_params"]["x_request_id"]
        expected = b""
        for index in range(4):
            choice = {"index": 0, "text": text_of("hello", 0, index), "finish_reason": "length" if index == 3 else None}
            chunk = {"id": f"cmpl-{base}", "object": "text_completion", "model": "stand-in", "choices": [choice]}
            expected += b"data: " + json.dumps(chunk).encode() + b"\n\n"
        assert reply.body == expected + b"data: [DONE]\n\n"
        assert reply.headers["Content-Type"].startswith("text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "children"),
    [
        ({"messages": [{"role": "user", "content": "hi"}], "n": 2}, 2),
        ({"prompt": "hello", "n": 2}, 2),
        ({"prompt": ["a", "b", "c", "d", "e"], "n": 2}, 10),
        ({"prompt": [[1, 2], [3, 4]], "n": 1}, 2),
    ],
)
async def test_x1_every_choice_arrives_with_one_dispatch(
    meta: str, stream: bool, body: dict[str, Any], children: int
) -> None:
    async with chain(meta) as c:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = await c.post({**body, "stream": stream}, path)
        assert reply.status == 200, reply.body
        assert sorted(reply.texts()) == list(range(children))
        if "prompt" in body and isinstance(body["prompt"], list):
            prompts = [p if isinstance(p, str) else json.dumps(p) for p in body["prompt"]]
            assert reply.texts() == {
                i * body["n"] + k: answer(prompt, k) for i, prompt in enumerate(prompts) for k in range(body["n"])
            }
        assert c.prefill.counts["requests"] == 1
        assert set(c.prefill.children.values()) == {1}
        assert c.decode.counts["kv-refused"] == 0
        await c.settled()


async def test_r3_a_list_larger_than_decode_goes_in_waves_each_child_once(meta: str) -> None:
    async with chain(meta, "--gather-window-s", "0.05") as c:
        c.decode.script.capacity = 3
        prompts = [f"prompt {number}" for number in range(8)]
        reply = await c.post({"prompt": prompts, "n": 2})
        assert reply.status == 200, reply.body
        assert reply.texts() == {i * 2 + k: answer(p, k) for i, p in enumerate(prompts) for k in range(2)}
        assert c.decode.most_held == 3
        assert c.prefill.counts["requests"] >= 6
        assert len(c.prefill.children) == 16
        assert set(c.prefill.children.values()) == {1}
        assert c.decode.counts["kv-refused"] == 0
        ids = [headers["X-Request-Id"] for headers in c.prefill.headers]
        assert len(set(ids)) == len(ids)
        await c.settled()


async def test_r4_an_aborted_sibling_holds_nobody_up(meta: str) -> None:
    async with chain(meta, "--gather-window-s", "30") as c:
        c.decode.script.abort_children = frozenset({(0, 0)})
        reply = await c.post({"prompt": ["a", "b"]})
        assert reply.texts() == {0: "", 1: answer("b")}
        await c.settled()


async def test_a_child_that_decode_has_cached_needs_no_prefill(meta: str) -> None:
    async with chain(meta, "--gather-window-s", "30") as c:
        c.decode.script.cached_children = frozenset({(0, 0)})
        assert (await c.post({"prompt": "a"})).texts() == {0: answer("a")}
        assert c.prefill.counts["requests"] == 0
        assert (await c.post({"prompt": ["a", "b"]})).texts() == {0: answer("a"), 1: answer("b")}
        assert c.prefill.bodies[0]["prompt"] == ["b"]
        await c.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_x2_prefill_errors_reach_the_client_and_decode_is_freed(meta: str, status: int, stream: bool) -> None:
    async with chain(meta) as c:
        c.prefill.script.status = status
        reply = await c.post({"prompt": "hello", "stream": stream})
        assert reply.status == status
        assert reply.json()["error"]["message"] == "scripted"
        assert ("Retry-After" in reply.headers) == (status in (429, 503))
        assert c.prefill.counts["requests"] == 1
        await c.settled()
        assert c.decode.counts["aborted"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_x2_prefill_dropping_the_connection_or_down_is_502(meta: str, stream: bool) -> None:
    async with chain(meta) as c:
        c.prefill.script.drop = True
        reply = await c.post({"prompt": "hello", "stream": stream})
        assert reply.status == 502
        assert "prefill engine" in reply.json()["error"]["message"]
        await c.settled()
        await c.prefill.stop()
        reply = await c.post({"prompt": "hello", "stream": stream})
        assert reply.status in (502, 503)
        await c.settled()


@pytest.mark.parametrize("how", ["500", "503", "drop", "down"])
async def test_x2_another_prefill_is_tried_while_nothing_was_sent(meta: str, how: str) -> None:
    async with chain(meta, prefills=2) as c:
        bad = c.prefills[0]
        bad.script.drop = how == "drop"
        bad.script.status = int(how) if how.isdecimal() else 200
        if how == "down":
            await bad.stop()
        for number in range(4):
            reply = await c.post({"prompt": f"hello {number}", "stream": bool(number % 2)})
            assert reply.texts() == {0: answer(f"hello {number}")}
        await c.settled()


async def test_4xx_of_decode_is_passed_through_at_once(meta: str) -> None:
    async with chain(meta, decodes=2) as c:
        for decode in c.decodes:
            decode.script.status, decode.script.body = 400, '{"error": {"message": "too long", "code": 400}}'
        reply = await c.post({"prompt": "hello"})
        assert (reply.status, reply.body) == (400, b'{"error": {"message": "too long", "code": 400}}')
        assert sum(decode.counts["requests"] for decode in c.decodes) == 1
        await c.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["500", "drop", "error_event", "empty"])
async def test_x3_decode_failing_before_the_first_byte_is_a_proper_status(meta: str, how: str, stream: bool) -> None:
    async with chain(meta) as c:
        script = c.decode.script
        script.drop, script.error_event, script.empty = how == "drop", how == "error_event", how == "empty"
        script.status = 500 if how == "500" else 200
        reply = await c.post({"prompt": "hello", "stream": stream})
        assert reply.status == (502 if how in ("drop", "empty") else 500)
        assert reply.json()["error"]["message"]
        await c.settled()


async def test_x3_another_decode_is_tried_before_the_first_byte(meta: str) -> None:
    async with chain(meta, decodes=2) as c:
        c.decodes[0].script.error_event = True
        for number in range(4):
            reply = await c.post({"prompt": f"hello {number}", "stream": True})
            assert reply.texts() == {0: answer(f"hello {number}")}
        assert c.decodes[0].counts["requests"] >= 1
        await c.settled()


async def test_x3_decode_failing_in_mid_stream_is_an_error_event_and_nothing_twice(meta: str) -> None:
    async with chain(meta, decodes=2) as c:
        for decode in c.decodes:
            decode.script.fail_after = 2
        reply = await c.post({"prompt": "hello", "stream": True})
        assert reply.status == 200
        assert reply.texts() == {0: text_of("hello", 0, 0) + text_of("hello", 0, 1)}
        assert "error" in reply.events[-1]
        assert "[DONE]" not in reply.events
        assert sum(decode.counts["requests"] for decode in c.decodes) == 1
        await c.settled()
        assert c.proxy.journal.outcomes == {Phase.FAILED: 1}


async def test_a_later_wave_failing_on_prefill_ends_the_stream_with_its_error(meta: str) -> None:
    async with chain(meta, "--gather-window-s", "0.05") as c:
        c.decode.script.capacity = 1
        c.decode.script.delay_s = 0.05
        async with c.session.post(c.url + "/v1/completions", json={"prompt": ["a", "b"], "stream": True}) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            c.prefill.script.status = 500
            body = await response.read()
        assert b"scripted" in body
        assert b"[DONE]" not in body
        await c.settled()


async def disconnect(c: Chain, body: dict[str, Any], when: str) -> None:
    """Starts a request and closes the connection in the given phase."""
    async with aiohttp.ClientSession() as session:

        async def request() -> None:
            async with session.post(c.url + "/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                if when == "streaming":
                    return
                await response.read()

        task = asyncio.create_task(request())
        if when == "streaming":
            await task
        elif when == "rendezvous":
            await until(lambda: c.decode.active == 1, "Decode has the request")
        elif when == "prefill":
            await until(lambda: c.prefill.active == 1, "Prefill has the request")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("when", "stream"),
    [("rendezvous", False), ("rendezvous", True), ("prefill", False), ("prefill", True), ("streaming", True)],
)
async def test_x4_a_client_that_goes_away_aborts_both_engines(meta: str, when: str, stream: bool) -> None:
    async with chain(meta) as c:
        c.prefill.gate = asyncio.Event()
        c.decode.script.silent = when == "rendezvous"
        c.decode.script.chunks, c.decode.script.delay_s = 1000, 0.01
        if when == "streaming":
            c.prefill.gate.set()
        await disconnect(c, {"prompt": "hello", "stream": stream}, when)
        await c.settled()
        assert c.decode.counts["aborted"] == 1
        assert c.prefill.counts["aborted"] == (1 if when == "prefill" else 0)
        assert c.proxy.journal.outcomes == {Phase.ABORTED: 1}


async def test_x4_a_client_that_goes_away_while_it_queues(meta: str) -> None:
    async with chain(meta, "--decode-limit", "1") as c:
        c.prefill.gate = asyncio.Event()
        first = asyncio.create_task(c.post({"prompt": "first"}))
        await until(lambda: c.decode.active == 1, "the first request is on Decode")
        second = asyncio.create_task(c.post({"prompt": "second"}))
        await until(lambda: c.proxy.router.decode.waiting == 1, "the second request queues")
        second.cancel()
        await until(lambda: c.proxy.router.decode.waiting == 0, "the second request is gone")
        c.prefill.gate.set()
        assert (await first).texts() == {0: answer("first")}
        assert c.decode.counts["requests"] == 1
        await c.settled()


async def test_x7_an_open_breaker_keeps_both_legs_away(meta: str) -> None:
    async with chain(meta, "--meta-outage-s", "0.3", "--retries", "0") as c:
        c.prefill.script.status = 500
        for _ in range(3):
            assert (await c.post({"prompt": "x"})).status == 500
        target = c.proxy.router.prefill.get(c.prefill.address)
        assert target is not None
        assert target.breaker.state is BreakerState.OPEN
        before = c.decode.counts["requests"], c.prefill.counts["requests"]
        reply = await c.post({"prompt": "x"})
        assert reply.status == 503
        assert "Retry-After" in reply.headers
        assert (c.decode.counts["requests"], c.prefill.counts["requests"]) == before
        c.prefill.script.status = 200
        await until(lambda: target.breaker.allows(c.proxy.router.prefill.now()), "the pause is over")
        assert (await c.post({"prompt": "x"})).status == 200
        assert target.breaker.state is BreakerState.CLOSED
        await c.settled()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404)],
)
async def test_unknown_paths(meta: str, method: str, path: str, status: int) -> None:
    async with chain(meta) as c, c.session.request(method, c.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == status


async def test_client_kv_parameters_are_refused(meta: str) -> None:
    async with chain(meta) as c:
        reply = await c.post({"prompt": "x", "kv_transfer_params": {"metaserver": "grpc://10.0.0.1:1"}})
        assert reply.status == 400
        assert "kv_transfer_params" in reply.json()["error"]["message"]
        assert c.decode.counts["requests"] == 0


async def test_headers_that_matter_are_forwarded_and_others_are_not(meta: str) -> None:
    async with chain(meta) as c:
        headers = {
            "Authorization": "Bearer key",
            "traceparent": "00-a-b-01",
            "X-Request-Id": "mine/../1",
            "X-data-parallel-rank": "3",
            "Cookie": "a=b",
        }
        first = await c.post({"prompt": "x"}, headers=headers)
        second = await c.post({"prompt": "x"}, headers=headers)
        for engine in (c.decode, c.prefill):
            assert engine.headers[0]["Authorization"] == "Bearer key"
            assert engine.headers[0]["traceparent"] == "00-a-b-01"
            assert "X-data-parallel-rank" not in engine.headers[0]
            assert "Cookie" not in engine.headers[0]
            assert engine.headers[0]["X-Request-Id"].startswith("mine-..-1-")
        assert first.headers["X-Request-Id"] != second.headers["X-Request-Id"]


async def test_requests_that_need_the_prompt_pass_run_whole_on_prefill(meta: str) -> None:
    async with chain(meta) as c:
        reply = await c.post({"prompt": "x", "echo": True, "logprobs": 1})
        assert reply.texts() == {0: "whole"}
        assert c.prefill.bodies[0] == {"prompt": "x", "echo": True, "logprobs": 1}
        assert c.decode.counts["requests"] == 0
        await c.settled()


async def test_models_tokenize_reset_and_health(meta: str) -> None:
    async with chain(meta) as c:
        async with c.session.get(c.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "stand-in"
        assert (await c.post({"prompt": "ab"}, "/tokenize")).json()["tokens"] == [97, 98]
        assert (await c.post({}, "/reset_prefix_cache")).status == 200
        assert c.prefill.counts["reset"] == c.decode.counts["reset"] == 1
        async with c.session.get(c.url + "/healthcheck") as response:
            assert response.status == 200
            assert (await response.json())["prefill_instances"] == 1
        c.decode.healthy = False
        target = c.proxy.router.decode.get(c.decode.address)
        assert target is not None
        await until(lambda: target.unusable_reason(0.0) is not None, "the probe sees it")
        for path in ("/health", "/healthcheck"):
            async with c.session.get(c.url + path) as response:
                assert response.status == 503


async def test_queue_full_is_429_with_retry_after(meta: str) -> None:
    async with chain(meta, "--decode-limit", "1", "--max-waiting", "1") as c:
        c.prefill.gate = asyncio.Event()
        tasks = [asyncio.create_task(c.post({"prompt": str(number)})) for number in range(5)]
        await until(lambda: sum(task.done() for task in tasks) == 3, "three are turned away")
        c.prefill.gate.set()
        replies = [await task for task in tasks]
        assert sorted(reply.status for reply in replies) == [200, 200, 429, 429, 429]
        assert all("Retry-After" in reply.headers for reply in replies if reply.status == 429)
        await c.settled()


async def test_no_child_advertised_is_504(meta: str) -> None:
    async with chain(meta, "--rendezvous-s", "0.3", "--retries", "0") as c:
        c.decode.script.silent = True
        reply = await c.post({"prompt": "x", "stream": True})
        assert reply.status == 504
        await c.settled()
