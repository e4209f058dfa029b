"""Reading a client's body within bounds of time; aiohttp bounds its size."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rd2h_proxy.bound import Bound, Holding
from rd2h_proxy.errors import ProxyError, RequestRefusedError


async def read_body(http: web.Request, limit_s: float, bodies: Bound) -> bytearray:
    """The whole body, unpacked. Its bytes count in `bodies` until the request has ended, for it is kept till then, as
    text or parsed.

    Raises:
        ProxyError: it was not complete within `limit_s` (408).
        UnavailableError: the bodies of all requests together are too large (503).
        RequestRefusedError: what came cannot be unpacked, or is no proper chunked body.
        web.HTTPRequestEntityTooLarge: it is longer than the application allows.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await _read(http, bodies.holding(http))
    except TimeoutError:
        raise ProxyError(408, f"body: not complete within {limit_s:g} s") from None
    except web.RequestPayloadError as error:
        raise RequestRefusedError(f"body: cannot be read ({error})") from error


async def _read(http: web.Request, holding: Holding) -> bytearray:
    """Like http.read(), which keeps what it read as long as the request lives: with pictures that is megabytes."""
    body = bytearray()
    async for chunk in http.content.iter_any():
        holding.add(len(chunk))
        body += chunk
        if len(body) > http.client_max_size:
            raise web.HTTPRequestEntityTooLarge(max_size=http.client_max_size, actual_size=len(body))
    return body
