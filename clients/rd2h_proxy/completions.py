"""Serving one completion or chat request: attempts, retries while nothing was sent, and the answer."""

from __future__ import annotations

import asyncio
import re
import uuid

from aiohttp import web

from rd2h_proxy.client_body import read_body
from rd2h_proxy.continued_answer import continued
from rd2h_proxy.dispatcher import Dispatcher, Tried
from rd2h_proxy.drain import STOPPING, StoppingError
from rd2h_proxy.errors import ProxyError
from rd2h_proxy.failure import AttemptError
from rd2h_proxy.frames import forget_frames
from rd2h_proxy.journal import Journal, RequestRecord
from rd2h_proxy.openai_request import Api, parse_request
from rd2h_proxy.phase import Phase
from rd2h_proxy.relay import ClientGoneError, StreamCutError, error_response, relay
from rd2h_proxy.stall import StallGuard

_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._-]")
_MAX_CLIENT_ID = 64


class CompletionHandler:
    """The two generating endpoints."""

    def __init__(self, dispatcher: Dispatcher, journal: Journal, guard: StallGuard) -> None:
        self._dispatcher = dispatcher
        self._journal = journal
        self._guard = guard

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._handle(http, Api.COMPLETION)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._handle(http, Api.CHAT)

    async def _handle(self, http: web.Request, api: Api) -> web.StreamResponse:
        client_id = _UNSAFE_IN_ID.sub("-", http.headers.get("X-Request-Id", ""))[:_MAX_CLIENT_ID]
        # A client may use one id twice; engines must never see the same id for two requests.
        base_id = f"{client_id}-{uuid.uuid4().hex[:12]}" if client_id else uuid.uuid4().hex
        record = self._journal.begin(base_id, api.value)
        finish, drain = self._journal.finish, self._dispatcher.router.drain
        try:
            response = await self._serve(http, api, record)
        except StreamCutError as cut:
            finish(record, Phase.FAILED, 200, str(cut))
            return cut.response
        except AttemptError as failure:
            finish(record, Phase.FAILED, failure.answer.status, str(failure))
            return error_response(failure.answer, base_id)
        except ProxyError as error:
            finish(record, Phase.FAILED, error.answer.status, str(error))
            return error_response(error.answer, base_id)
        except (ClientGoneError, asyncio.CancelledError) as end:
            forget_frames(end)
            if isinstance(end, asyncio.CancelledError) and drain.took_cancellation():
                stopping = StoppingError()
                finish(record, Phase.FAILED, stopping.answer.status, STOPPING)
                return error_response(stopping.answer, base_id)
            finish(record, Phase.ABORTED, 0, STOPPING if drain.over else "the client went away")
            raise
        except web.HTTPException as error:
            finish(record, Phase.FAILED, error.status, error.reason)
            raise
        except Exception as error:
            finish(record, Phase.FAILED, 500, repr(error))
            raise
        finish(record, Phase.DONE, response.status)
        return response

    async def _serve(self, http: web.Request, api: Api, record: RequestRecord) -> web.StreamResponse:
        # The text is dropped as soon as it is parsed: a stream lives long, and pictures are large.
        limits, bodies = self._dispatcher.limits, self._dispatcher.router.bodies
        request = parse_request(api, await read_body(http, self._guard.limit_s, bodies), limits.max_children)
        record.children = request.expected_children
        tried = Tried()
        while True:
            try:
                async with self._dispatcher.attempt(request, http.headers, record, tried) as running:
                    record.first_byte_s = record.life.since - record.life.began
                    answer = await continued(self._dispatcher, running, http.headers, record)
                    drain = self._dispatcher.router.drain
                    return await relay(http, answer, record.request_id, self._guard, drain)
            except AttemptError as failure:
                forget_frames(failure)
                tried.add(failure)
                if not self._dispatcher.may_retry(failure, request, record, tried):
                    raise
            record.enter(Phase.QUEUED)
