"""Choosing engines for a request and running one attempt on them."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rd2h_proxy.answer_leg import EngineAnswer
from rd2h_proxy.attempt import Attempt
from rd2h_proxy.errors import UnavailableError
from rd2h_proxy.failure import AttemptError, Blame
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.leg_body import LegIds
from rd2h_proxy.limits import ServingLimits
from rd2h_proxy.openai_request import OpenAiRequest
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import EnginePool, Filter, Lease, anything
from rd2h_proxy.recompute_policy import tracks_tokens
from rd2h_proxy.router import Router
from rd2h_proxy.target import Target, pair_conflict
from rd2h_proxy.whole_attempt import WholeAttempt


@dataclass(slots=True)
class Tried:
    """Engines that failed a request."""

    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()
    suspects: list[AttemptError] = field(default_factory=list)
    """Failures that are an engine's fault if another engine does better."""

    def add(self, failure: AttemptError) -> None:
        """Takes note of who is to blame."""
        if failure.blame is Blame.PREFILL:
            self.prefill |= {failure.address}
        elif failure.blame is Blame.DECODE:
            self.decode |= {failure.address}
        if failure.doubtful:
            self.suspects.append(failure)


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt with its answer begun."""

    answer: EngineAnswer
    lease: Lease
    """The place on the answering engine; may be released when the answer has been read to its end."""
    request: OpenAiRequest
    """The request as the engine got it."""


class Dispatcher:
    """Runs attempts."""

    def __init__(self, router: Router, limits: ServingLimits) -> None:
        self.router = router
        self.limits = limits

    def may_retry(self, failure: AttemptError, request: OpenAiRequest, record: RequestRecord, tried: Tried) -> bool:
        """Whether another attempt is safe and there is an engine for it. Only asked while nothing was sent."""
        if not failure.retryable or record.attempts > self.limits.retries:
            return False
        if not self.router.prefill.usable(exclude=tried.prefill):
            return False
        if request.whole_reason is not None:
            return True
        return bool(self.router.decode.usable(self._decode_filter(tried), tried.decode))

    @asynccontextmanager
    async def attempt(
        self, request: OpenAiRequest, client_headers: Mapping[str, str], record: RequestRecord, tried: Tried
    ) -> AsyncIterator[Running]:
        """One attempt; it is ended in the way the context is left.

        Raises:
            ProxyError: no engine has room, or the meta service is away.
            AttemptError: there will be no answer.
        """
        whole = request.whole_reason is not None
        lease = await self._acquire(request, tried)
        with lease:
            suffix = f"-r{record.attempts}" if record.attempts else ""
            ids = LegIds(uuid.uuid4().hex, record.request_id + suffix)
            record.attempts += 1
            attempt: Attempt | WholeAttempt
            if whole:
                record.prefill = lease.target.address
                attempt = WholeAttempt(self.router, request, ids, lease, client_headers, record)
            else:
                record.decode = lease.target.address
                if tracks_tokens(self.limits.recompute, request, lease.target):
                    body = {**request.body, "return_token_ids": True}
                    request = dataclasses.replace(request, body=body, tracks_tokens=True)
                attempt = Attempt(self.router, request, ids, lease, client_headers, record, tried.prefill)
            async with attempt:
                answer = await attempt.answer()
                self._blame_suspects(tried)
                record.enter(Phase.STREAMING)
                yield Running(answer, lease, request)

    def _blame_suspects(self, tried: Tried) -> None:
        """The request is served, so it was not at fault for what happened before."""
        for failure in tried.suspects:
            pool = self.router.prefill if failure.blame is Blame.PREFILL else self.router.decode
            if (target := pool.get(failure.address)) is not None:
                target.breaker.failed(pool.now())
        tried.suspects.clear()

    async def _acquire(self, request: OpenAiRequest, tried: Tried) -> Lease:
        work = request.prompt_tokens(self.router.ratio.bytes_per_token) + request.output_tokens()
        if request.whole_reason is not None:
            return await self._wait(self.router.prefill, work, anything, tried.prefill)
        await self.router.meta.wait_connected()
        try:
            return await self._wait(self.router.decode, work, self._decode_filter(tried), tried.decode)
        except UnavailableError as error:
            if conflict := await self._conflict():
                raise UnavailableError(f"no Prefill engine fits a Decode engine: {conflict}") from error
            raise

    async def _wait(self, pool: EnginePool, work: int, fits: Filter, exclude: frozenset[str]) -> Lease:
        hopeful = pool.usable(fits, exclude)
        timeout_s = self.limits.queue_s if hopeful else min(self.limits.queue_s, self.limits.no_engine_s)
        return await pool.acquire(work, timeout_s, fits, exclude)

    async def _conflict(self) -> str:
        """What keeps usable engines apart, in the words of the meta service; empty when it is something else."""
        for decode in self.router.decode.usable():
            for prefill in self.router.prefill.usable():
                pair = pair_conflict(prefill, decode)
                if pair is not None:
                    return await self.router.meta.explain_conflict(*pair)
        return ""

    def _decode_filter(self, tried: Tried) -> Filter:
        """Decode is only worth asking when some Prefill engine could feed it."""

        def fits(decode: Target) -> bool:
            prefills = self.router.prefill.usable(exclude=tried.prefill)
            return any(pair_conflict(prefill, decode) is None for prefill in prefills)

        return fits
