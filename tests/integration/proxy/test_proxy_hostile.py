"""Clients that send nonsense, or send and read so slowly that they only hold on to things."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket

import pytest
from aiohttp import web
from proxy_harness import Chain, chain, until
from proxy_standins import DecodeStandIn
from rd2h_proxy import service

BODY = json.dumps({"prompt": "hello"}).encode()


def request(body: bytes, *headers: str, length: int | None = None, path: str = "/v1/completions") -> bytes:
    """The bytes of one POST."""
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*head, "Connection: close", "", ""]).encode() + body


async def connect(c: Chain) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose buffers are small, so that little of an answer fits on the way."""
    host, port = c.proxy.address.split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return await asyncio.open_connection(sock=sock, limit=1024)


async def answer_to(c: Chain, sent: bytes) -> bytes:
    """Everything that comes back before the proxy closes the connection."""
    reader, writer = await connect(c)
    writer.write(sent)
    async with asyncio.timeout(10):
        answer = await reader.read(-1)
    writer.close()
    return answer


async def test_a_compressed_body_is_read_and_a_broken_one_is_400(meta: str) -> None:
    async with chain(meta) as c:
        assert b" 200 OK" in await answer_to(c, request(gzip.compress(BODY), "Content-Encoding: gzip"))
        for path in ("/v1/completions", "/tokenize"):
            broken = await answer_to(c, request(b"no gzip at all", "Content-Encoding: gzip", path=path))
            assert broken.startswith(b"HTTP/1.1 400 "), broken
            assert b'"error"' in broken
        await c.settled()


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused(meta: str) -> None:
    async with chain(meta, "--max-body-mib", "1") as c:
        bomb = gzip.compress(b" " * (64 << 20) + BODY)
        assert b" 413 " in await answer_to(c, request(bomb, "Content-Encoding: gzip"))
        await c.settled()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_body_that_does_not_come_is_given_up(meta: str, path: str) -> None:
    async with chain(meta, "--client-stall-s", "0.5") as c:
        reader, writer = await connect(c)
        writer.write(request(BODY, length=1000, path=path))
        async with asyncio.timeout(10):
            answer = await reader.readline()
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        writer.close()
        await c.settled()


async def test_a_request_that_never_gets_complete_is_given_up(meta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_IDLE_CLIENT_S", 0.5)
    async with chain(meta) as c:
        assert await answer_to(c, b"POST /v1/completions HTTP/1.1\r\nHost:") == b""


class Verbose(DecodeStandIn):
    """Gives long answers."""

    async def _tokenize(self, _http: web.Request) -> web.Response:
        return web.Response(body=b"x" * (15 << 20))


async def test_a_client_that_does_not_read_a_complete_answer_is_cut_off(
    meta: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with chain(meta, "--client-stall-s", "1", decode_type=Verbose) as c:
        caplog.set_level(logging.WARNING, "rd2h_proxy.stall")
        _, writer = await connect(c)
        writer.write(request(BODY, path="/tokenize"))
        await until(lambda: "does not read" in caplog.text, "the proxy has cut the connection")
        writer.close()


async def test_405_says_what_is_allowed(meta: str) -> None:
    async with chain(meta) as c, c.session.options(c.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
