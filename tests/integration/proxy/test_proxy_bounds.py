"""Bounds over all clients: bytes of request bodies, and requests that are passed through."""

from __future__ import annotations

import asyncio
import gzip
import time

from aiohttp import web
from proxy_harness import Chain, Reply, chain, until
from proxy_standins import DecodeStandIn

MIB = 1 << 20


def refused(reply: Reply) -> bool:
    """Whether an answer says that the client should come back later."""
    return reply.status == 503 and int(reply.headers["Retry-After"]) >= 1 and "at a time" in reply.body.decode()


async def test_bodies_of_all_requests_together_are_bounded(meta: str) -> None:
    async with chain(meta, "--max-body-mib", "2", "--max-bodies-mib", "4") as c:
        c.prefill.gate = asyncio.Event()
        held = [asyncio.create_task(c.post({"prompt": "x" * (3 * MIB // 2)})) for _ in range(2)]
        await until(lambda: c.prefill.active == 2, "two requests are under way")
        async with c.session.get(c.url + "/healthcheck") as response:
            held_bytes = (await response.json())["held"]["body_bytes"]
        assert held_bytes["limit"] == 4 * MIB
        assert 3 * MIB <= held_bytes["used"] < 3 * MIB + 1000
        for path in ("/v1/completions", "/tokenize"):
            assert refused(await c.post({"prompt": "x" * (3 * MIB // 2)}, path))
        assert (await c.post({"prompt": "small"}, "/tokenize")).status == 200
        c.prefill.gate.set()
        assert [reply.status for reply in await asyncio.gather(*held)] == [200, 200]
        await until(lambda: c.proxy.router.bodies.used == 0, "the bodies are gone")
        assert (await c.post({"prompt": "x" * (3 * MIB // 2)})).status == 200
        assert all(target.breaker.failures == 0 for target in c.proxy.router.decode.targets)
        await c.settled()


async def test_a_packed_body_counts_as_it_is_held(meta: str) -> None:
    async with chain(meta, "--max-body-mib", "2", "--max-bodies-mib", "2") as c:
        c.prefill.gate = asyncio.Event()
        held = asyncio.create_task(c.post({"prompt": "x" * MIB}))
        await until(lambda: c.prefill.active == 1, "a request is under way")
        packed = gzip.compress(b'{"prompt": "' + b"x" * (3 * MIB // 2) + b'"}')
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with c.session.post(c.url + "/v1/completions", data=packed, headers=headers) as response:
            assert response.status == 503
        c.prefill.gate.set()
        assert (await held).status == 200
        await c.settled()


async def test_a_body_that_has_come_in_part_counts_and_is_given_back_when_its_client_leaves(meta: str) -> None:
    async with chain(meta, "--max-body-mib", "2", "--max-bodies-mib", "2") as c:
        host, port = c.proxy.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {2 * MIB}\r\n\r\n"
        writer.write(head.encode() + b"x" * (3 * MIB // 2))
        await until(lambda: c.proxy.router.bodies.used == 3 * MIB // 2, "most of the body is there")
        assert refused(await c.post({"prompt": "x" * MIB}))
        writer.close()
        await c.settled()


class Slow(DecodeStandIn):
    """Thinks about tokens until the end of the test, or answers at length."""

    gate: asyncio.Event
    answer: bytes = b"{}"

    async def _tokenize(self, _http: web.Request) -> web.Response:
        self.counts["tokenize"] += 1
        await self.gate.wait()
        return web.Response(body=self.answer)


def slow(c: Chain) -> Slow:
    assert isinstance(c.decode, Slow)
    c.decode.gate = asyncio.Event()
    return c.decode


async def test_requests_passed_through_are_bounded(meta: str) -> None:
    async with chain(meta, "--max-passing", "3", decode_type=Slow) as c:
        decode = slow(c)
        held = [asyncio.create_task(c.post({"prompt": "x"}, "/tokenize")) for _ in range(3)]
        await until(lambda: decode.counts["tokenize"] == 3, "three are under way")
        assert refused(await c.post({"prompt": "x"}, "/tokenize"))
        async with c.session.get(c.url + "/v1/models") as response:
            assert response.status == 503
        # Those that generate have bounds of their own.
        assert (await c.post({"prompt": "x"})).status == 200
        held[0].cancel()
        await until(lambda: c.proxy.router.passing.used == 2, "a client that goes away makes room")
        async with c.session.get(c.url + "/v1/models") as response:
            assert response.status == 200
        decode.gate.set()
        assert [reply.status for reply in await asyncio.gather(*held[1:])] == [200, 200]
        await c.settled()


async def test_an_answer_that_is_not_read_keeps_its_place_until_the_client_is_cut(meta: str) -> None:
    async with chain(meta, "--max-passing", "1", "--client-stall-s", "1", decode_type=Slow) as c:
        decode = slow(c)
        decode.answer = b"x" * (15 * MIB)
        decode.gate.set()
        host, port = c.proxy.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}')
        await until(lambda: decode.counts["tokenize"] == 1, "Decode was asked")
        # Long enough for the answer to be in the proxy, and shorter than the client is given.
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            assert refused(await c.post({"prompt": "x"}, "/tokenize"))
        await c.settled()
        writer.close()
