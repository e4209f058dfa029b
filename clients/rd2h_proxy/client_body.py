"""Reading a client's body within bounds of time; aiohttp bounds its size."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rd2h_proxy.errors import ProxyError, RequestRefusedError


async def read_body(http: web.Request, limit_s: float) -> bytes:
    """The whole body, unpacked.

    Raises:
        ProxyError: it was not complete within `limit_s` (408).
        RequestRefusedError: what came cannot be unpacked, or is no proper chunked body.
        web.HTTPRequestEntityTooLarge: it is longer than the application allows.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await http.read()
    except TimeoutError:
        raise ProxyError(408, f"body: not complete within {limit_s:g} s") from None
    except web.RequestPayloadError as error:
        raise RequestRefusedError(f"body: cannot be read ({error})") from error
