"""What happens around every request, whatever its path."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rd2h_proxy.bound import AT_END
from rd2h_proxy.drain import Drain, StoppingError
from rd2h_proxy.errors import ErrorAnswer, ProxyError
from rd2h_proxy.relay import ClientGoneError, error_response
from rd2h_proxy.stall import StallGuard

log = logging.getLogger(__name__)


def known_to(drain: Drain) -> Middleware:
    """Has the drain know of requests until their answers are written, and gives back what they held. The outermost."""

    @web.middleware
    async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            with drain.request(), ExitStack() as at_end:
                request[AT_END] = at_end
                return await handler(request)
        except StoppingError as late:
            return error_response(late.answer, "-")

    return serve


def written_in_time(guard: StallGuard) -> Middleware:
    """Writes complete answers under the eyes of the guard; streams are watched by the relay."""

    @web.middleware
    async def write(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if not response.prepared and request.transport is not None:
            with guard.watch(request.transport) as writing:
                writing.since = time.monotonic()
                try:
                    await response.prepare(request)
                    await response.write_eof()
                except ConnectionError:
                    # aiohttp meets the closed connection next, and ends it.
                    log.debug("%s %s: the client went away", request.method, request.path)
        return response

    return write


def errors_as_json(drain: Drain) -> Middleware:
    """Turns what handlers raise into answers that OpenAI clients understand."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = error_response(ErrorAnswer.make(error.status, error.text or error.reason), "-")
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except ProxyError as error:
            return error_response(error.answer, "-")
        except asyncio.CancelledError:
            if drain.took_cancellation():
                return error_response(StoppingError().answer, "-")
            raise
        except ClientGoneError:
            # Nobody reads this; aiohttp only needs something to fail to send.
            return web.Response(status=499)

    return answer
