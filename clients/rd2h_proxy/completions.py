"""Serving one completion or chat request: attempts, retries while nothing was sent, and the answer."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass

from aiohttp import web

from rd2h_proxy.attempt import Attempt
from rd2h_proxy.errors import ProxyError, UnavailableError
from rd2h_proxy.failure import AttemptError, Blame
from rd2h_proxy.journal import Journal, RequestRecord
from rd2h_proxy.leg_body import LegIds
from rd2h_proxy.openai_request import Api, OpenAiRequest, parse_request
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import EnginePool, Filter, Lease
from rd2h_proxy.relay import ClientGoneError, StreamCutError, error_response, relay
from rd2h_proxy.router import Router
from rd2h_proxy.target import Target, pair_conflict
from rd2h_proxy.whole import WholeAttempt

_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._-]")
_MAX_CLIENT_ID = 64


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of a request as a whole."""

    max_children: int = 1024
    """Most prompts x n."""
    retries: int = 1
    """Further attempts on other engines, while nothing was sent and the failure is safe to retry."""
    queue_s: float = 30.0
    """Longest wait for a Decode engine with room."""
    no_engine_s: float = 8.0
    """Longest wait when no engine is usable at all."""


@dataclass(slots=True)
class _Tried:
    """Engines that failed this request."""

    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()

    def add(self, failure: AttemptError) -> None:
        if failure.blame is Blame.PREFILL:
            self.prefill |= {failure.address}
        elif failure.blame is Blame.DECODE:
            self.decode |= {failure.address}


class CompletionHandler:
    """The two generating endpoints."""

    def __init__(self, router: Router, limits: ServingLimits, journal: Journal) -> None:
        self._router = router
        self._limits = limits
        self._journal = journal

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
        finish = self._journal.finish
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
        except (ClientGoneError, asyncio.CancelledError):
            finish(record, Phase.ABORTED, 0, "the client went away")
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
        request = parse_request(api, await http.read(), self._limits.max_children)
        record.children = request.expected_children
        tried = _Tried()
        while True:
            try:
                return await self._attempt(http, request, record, tried)
            except AttemptError as failure:
                tried.add(failure)
                if not self._may_retry(failure, request, record, tried):
                    raise
            record.enter(Phase.QUEUED)

    def _may_retry(self, failure: AttemptError, request: OpenAiRequest, record: RequestRecord, tried: _Tried) -> bool:
        if not failure.retryable or record.attempts > self._limits.retries:
            return False
        if not self._router.prefill.usable(exclude=tried.prefill):
            return False
        return request.whole_reason is not None or bool(
            self._router.decode.usable(self._decode_filter(tried), tried.decode)
        )

    async def _attempt(
        self, http: web.Request, request: OpenAiRequest, record: RequestRecord, tried: _Tried
    ) -> web.StreamResponse:
        whole = request.whole_reason is not None
        if not whole:
            await self._router.meta.wait_connected()
        work = request.prompt_tokens(self._router.ratio.bytes_per_token) + request.output_tokens()
        if whole:
            lease = await self._acquire(self._router.prefill, work, lambda _: True, tried.prefill)
        else:
            lease = await self._acquire(self._router.decode, work, self._decode_filter(tried), tried.decode)
        with lease:
            number = record.attempts
            record.attempts += 1
            if whole:
                record.prefill = lease.target.address
            else:
                record.decode = lease.target.address
            suffix = f"-r{number}" if number else ""
            ids = LegIds(uuid.uuid4().hex, record.request_id + suffix)
            attempt = (
                WholeAttempt(self._router, request, ids, lease, http.headers, record)
                if whole
                else Attempt(self._router, request, ids, lease, http.headers, record, tried.prefill)
            )
            async with attempt:
                answer = await attempt.answer()
                record.enter(Phase.STREAMING)
                record.first_byte_s = record.life.since - record.life.began
                return await relay(http, answer, record.request_id)

    async def _acquire(self, pool: EnginePool, work: int, fits: Filter, exclude: frozenset[str]) -> Lease:
        hopeful = pool.usable(fits, exclude)
        timeout_s = self._limits.queue_s if hopeful else min(self._limits.queue_s, self._limits.no_engine_s)
        try:
            return await pool.acquire(work, timeout_s, fits, exclude)
        except UnavailableError as error:
            if pool is self._router.decode and (conflict := await self._conflict()):
                raise UnavailableError(f"no Prefill engine fits a Decode engine: {conflict}") from error
            raise

    async def _conflict(self) -> str:
        """What keeps usable engines apart, in the words of the meta service; empty when it is something else."""
        for decode in self._router.decode.usable():
            for prefill in self._router.prefill.usable():
                pair = pair_conflict(prefill, decode)
                if pair is not None:
                    return await self._router.meta.explain_conflict(*pair)
        return ""

    def _decode_filter(self, tried: _Tried) -> Filter:
        """Decode is only worth asking when some Prefill engine could feed it."""

        def fits(decode: Target) -> bool:
            return any(
                pair_conflict(prefill, decode) is None for prefill in self._router.prefill.usable(exclude=tried.prefill)
            )

        return fits
