"""HTTP towards engines: one client session for both legs, and reading their answers within bounds."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

MAX_ERROR_BYTES = 1 << 20
# Shorter than the 5 s after which uvicorn closes an idle connection: a request must not meet that moment.
_IDLE_CONNECTION_S = 3.0
_CONNECT_S = 5.0

# What a client may tell the engines. Everything else (routing and hop-by-hop headers above all) stays here.
FORWARDED_HEADERS = ("Authorization", "traceparent", "tracestate", "baggage")


class AnswerTooLargeError(Exception):
    """An engine's answer is longer than the proxy holds in memory."""


def make_session(idle_timeout_s: float) -> aiohttp.ClientSession:
    """The session for all engines. Concurrency is bounded by the pools, not by the connector."""
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_IDLE_CONNECTION_S, ttl_dns_cache=10, socket_factory=_keepalive_socket
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=idle_timeout_s)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )


def _keepalive_socket(
    address: tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]],
) -> socket.socket:
    family, kind, proto, _, _ = address
    sock = socket.socket(family, kind, proto)
    # A host that loses power says nothing; without keep-alive its streams would hang until the idle time-out.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def leg_headers(client_headers: Mapping[str, str], x_request_id: str) -> dict[str, str]:
    """Headers of a request to an engine."""
    headers = {name: client_headers[name] for name in FORWARDED_HEADERS if name in client_headers}
    headers["X-Request-Id"] = x_request_id
    headers["Content-Type"] = "application/json"
    # The body is passed through and sometimes read: compression would only stand in the way.
    headers["Accept-Encoding"] = "identity"
    return headers


async def read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        AnswerTooLargeError: it is longer than `limit_bytes`.
        aiohttp.ClientError: the connection broke before the end.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise AnswerTooLargeError(f"answer of more than {limit_bytes} bytes")
    return bytes(body)
