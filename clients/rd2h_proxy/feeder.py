"""Follows a rendezvous and sends its children to Prefill, wave by wave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rd2h_client.v1.rendezvous_pb2 import Child, ChildEnded, Outcome, RendezvousClosed, RendezvousEvent

from rd2h_proxy.engine_http import leg_headers
from rd2h_proxy.errors import ErrorAnswer, ProxyError
from rd2h_proxy.failure import AttemptError, Blame, engine_failure
from rd2h_proxy.frames import forget_frames
from rd2h_proxy.gathering import BadAdvertError, Gathering
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.judgement import judge
from rd2h_proxy.leg_body import LegIds, encode, prefill_body
from rd2h_proxy.loss import unless_lost
from rd2h_proxy.meta_link import META_TROUBLE, Closable
from rd2h_proxy.openai_request import OpenAiRequest
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import Lease
from rd2h_proxy.prefill_leg import NotAcceptedError, run_prefill
from rd2h_proxy.router import Router
from rd2h_proxy.target import Target, pair_conflict

log = logging.getLogger(__name__)

# How often a rendezvous that is not complete looks whether the meta service is still there.
_OUTAGE_CHECK_S = 0.5
# Silence after which the meta service is asked whether it has taken our await at all.
_AWAIT_CHECK_S = 0.4


class Feeder:
    """The Prefill side of one attempt. `run` returns when nothing is left to do for it."""

    def __init__(
        self,
        router: Router,
        request: OpenAiRequest,
        ids: LegIds,
        decode: Lease,
        client_headers: Mapping[str, str],
        record: RequestRecord,
        exclude_prefill: frozenset[str],
    ) -> None:
        self._router = router
        self._request = request
        self._ids = ids
        self._decode = decode
        self._headers = client_headers
        self._record = record
        self._exclude = exclude_prefill
        self._gathering = Gathering(request.prompts, request.n, router.limits.gather_window_s)
        self._waves: dict[asyncio.Task[None], list[Child]] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._started = self._now()
        self._outage_since: float | None = None
        self._await_check: asyncio.Task[bool] | None = None
        self._is_awaited = False
        self._failed_at: float | None = None
        self._failure_reason = ""
        self._ended_outside = False
        self.answer_began = False
        """Set by the attempt: the client is being served, so the meta service may be away for longer."""
        self.closed = False
        """The meta service has ended the rendezvous; it needs not be told."""

    @property
    def dispatching(self) -> bool:
        """Whether Prefill is working for this attempt."""
        return bool(self._waves)

    @property
    def arrived(self) -> int:
        """Children that Decode has advertised or ended."""
        return self._gathering.arrived

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    async def run(self) -> None:
        """Awaits children and dispatches them.

        Raises:
            AttemptError: Prefill, the meta service or a time limit makes an answer impossible.
        """
        ids, limits = self._ids, self._router.limits
        try:
            events = self._router.meta.api.await_children(ids.rendezvous_id, self._gathering.expected, limits.ttl_s)
        except META_TROUBLE as error:
            raise _meta_refused(error) from error
        pending: asyncio.Future[RendezvousEvent] | None = _next(events)
        try:
            while pending is not None or self._waves or self._failed_at is not None:
                waiting: set[asyncio.Future[Any]] = {*self._waves}
                if pending is not None:
                    waiting.add(pending)
                if self._await_check is not None:
                    waiting.add(self._await_check)
                await _wait_any(waiting, self._next_timeout_s())
                self._collect_waves()
                self._collect_await_check()
                if pending is not None and pending.done():
                    pending = _next(events) if self._take(pending) else None
                self._dispatch_due()
                self._check_limits()
        finally:
            leftovers: list[asyncio.Future[Any]] = [*self._waves]
            if pending is not None:
                leftovers.append(pending)
            if self._await_check is not None:
                leftovers.append(self._await_check)
            for task in leftovers:
                task.cancel()
            await asyncio.gather(*leftovers, return_exceptions=True)
            # A cancelled wave remembers frames that refer to us: see forget_frames.
            self._waves.clear()
            self._await_check = None
            if isinstance(events, Closable):
                await events.aclose()

    def _take(self, pending: asyncio.Future[RendezvousEvent]) -> bool:
        """Applies one event; False when the stream of events is over."""
        try:
            event = pending.result()
        except StopAsyncIteration as end:
            forget_frames(end)
            self.closed = True
            return False
        except META_TROUBLE as error:
            # Who is missing would never be sent to Prefill, and a stream that has begun would hang on that.
            if self._gathering.accounted:
                log.warning("rendezvous %s is no longer followed: %s", self._ids.rendezvous_id, error)
                return False
            raise _meta_refused(error) from error
        self._apply(event)
        return True

    def _apply(self, event: RendezvousEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "advertised":
            self._advertised(event.advertised)
        elif kind == "child_ended":
            self._child_ended(event.child_ended)
        elif kind == "complete":
            self._gathering.completed()
        elif kind == "closed":
            self._rendezvous_ended(event.closed)

    def _child_ended(self, ended: ChildEnded) -> None:
        done = ended.outcome == Outcome.OUTCOME_DONE
        possible = self._gathering.ended(ended.request_id, ended.prompt_index, ended.choice_index, done)
        if ended.outcome in (Outcome.OUTCOME_FAILED, Outcome.OUTCOME_EXPIRED):
            self._note_failure(f"child {ended.request_id}: {ended.reason}")
        elif not possible:
            self._note_failure(
                f"child {ended.request_id} is said to be served, but Prefill was not asked ({ended.reason})", True
            )

    def _rendezvous_ended(self, closed: RendezvousClosed) -> None:
        gathering = self._gathering
        missing = not gathering.all_ended
        gathering.closed()
        if closed.outcome in (Outcome.OUTCOME_FAILED, Outcome.OUTCOME_EXPIRED):
            self._note_failure(closed.reason)
        elif missing:
            # The last child's end ends a rendezvous; before that only we do, and we have not.
            self._note_failure(f"the rendezvous was ended from outside: {closed.reason or 'no reason given'}", True)
        elif not gathering.served:
            # Where some are served, those that Decode aborted are Decode's to tell, in its answer.
            self._note_failure(closed.reason)

    def _advertised(self, child: Child) -> None:
        try:
            self._gathering.advertised(child, self._now())
        except BadAdvertError as error:
            raise engine_failure(Blame.DECODE, self._decode.target.address, str(error)) from error
        self._router.membership.learn(child.engine_id, self._decode.target.address)
        if child.prompt_tokens:
            self._learn_size(child)

    def _learn_size(self, child: Child) -> None:
        """Decode counts tokens where the proxy could only guess, at pictures above all."""
        request = self._request
        if not request.sizes_are_tokens and not request.media_tokens:
            self._router.ratio.learn(request.prompt_sizes[child.prompt_index], child.prompt_tokens)
        self._prompt_tokens[child.prompt_index] = child.prompt_tokens
        if len(self._prompt_tokens) == request.prompts:
            self._decode.adjust_work(sum(self._prompt_tokens.values()) + request.output_tokens())

    def _note_failure(self, reason: str, from_outside: bool = False) -> None:
        # Decode hears the same and answers with the status that belongs to it; we only make sure that it does.
        if self._failed_at is None:
            self._failed_at = self._now()
            self._failure_reason = reason
            self._ended_outside = from_outside

    def _next_timeout_s(self) -> float | None:
        now, limits = self._now(), self._router.limits
        times = []
        if (due := self._gathering.due_at()) is not None:
            times.append(due)
        if not self._gathering.accounted:
            times.append(now + _OUTAGE_CHECK_S)
        if self._failed_at is not None:
            times.append(self._failed_at + limits.child_failed_grace_s)
        return max(0.0, min(times) - now) if times else None

    def _check_limits(self) -> None:
        now, limits = self._now(), self._router.limits
        if self._failed_at is not None and now >= self._failed_at + limits.child_failed_grace_s:
            self._give_up()
        if self._gathering.accounted:
            self._outage_since = None
            return
        if not self.answer_began and self._gathering.arrived == 0 and now >= self._started + limits.rendezvous_s:
            reason = f"no child advertised within {limits.rendezvous_s:g} s"
            raise engine_failure(Blame.DECODE, self._decode.target.address, reason, status=504)
        meta = self._router.meta
        if meta.connected:
            self._outage_since = None
            self._check_await(now)
            return
        # When it is back it may be another run of the service, and full.
        self._is_awaited = False
        if self._outage_since is None:
            self._outage_since = now
        elif now >= self._outage_since + (limits.rendezvous_s if self.answer_began else meta.outage_limit_s):
            error = meta.unavailable()
            raise AttemptError(error.answer, str(error), Blame.PROXY)

    def _check_await(self, now: float) -> None:
        """Without any child, perhaps the meta service has no place for the rendezvous. Decode is not to blame then."""
        if self._is_awaited or self._await_check is not None or self._gathering.arrived:
            return
        if now >= self._started + _AWAIT_CHECK_S:
            ids, expected, ttl_s = self._ids, self._gathering.expected, self._router.limits.ttl_s
            check = self._router.meta.is_awaited(ids.rendezvous_id, expected, ttl_s)
            self._await_check = asyncio.create_task(check, name="await-check")

    def _collect_await_check(self) -> None:
        check = self._await_check
        if check is None or not check.done():
            return
        self._await_check = None
        try:
            self._is_awaited = check.result()
        except META_TROUBLE as error:
            raise _meta_refused(error) from error

    def _give_up(self) -> None:
        """Decode has had its time to tell of a failure."""
        reason = self._failure_reason
        if self._ended_outside:
            if self.answer_began and self._gathering.accounted and not self._gathering.dropped:
                # All are with Prefill and the client is being served: what is missing, Decode tells.
                log.warning("%s goes on: %s", self._ids.rendezvous_id, reason)
                self._failed_at = None
                return
            raise AttemptError(ErrorAnswer.make(503, reason, 1), reason, Blame.META)
        blame = Blame.PREFILL if self._gathering.waves else Blame.DECODE
        raise AttemptError(ErrorAnswer.make(502, reason), reason, blame)

    def _dispatch_due(self) -> None:
        due = self._gathering.due_at()
        if due is None or due > self._now():
            return
        number = self._gathering.waves
        children = self._gathering.take_wave()
        if not self.answer_began:
            self._record.enter(Phase.PREFILL)
        self._waves[asyncio.create_task(self._run_wave(children, number), name="prefill-wave")] = children

    def _collect_waves(self) -> None:
        for task in [task for task in self._waves if task.done()]:
            children = self._waves.pop(task)
            error = task.exception()
            if error is None:
                continue
            if not any(child.request_id in self._gathering.live for child in children):
                log.info("Prefill failed after all of its children had ended: %s", error)
                continue
            raise error

    async def _run_wave(self, children: Sequence[Child], number: int) -> None:
        """Sends a wave to one Prefill engine; to another only if the first never began it."""
        exclude = set(self._exclude)
        while True:
            with await self._acquire(children, exclude) as lease:
                self._record.prefill = lease.target.address
                try:
                    await unless_lost(lease.target, self._send(lease.target, children, number))
                    lease.succeeded()
                    return
                except NotAcceptedError as refusal:
                    failure = refusal.failure
                except AttemptError as error:
                    judge(lease, Blame.PREFILL, error, self._request, begun=True)
                    raise
                judge(lease, Blame.PREFILL, failure, self._request, begun=True)
            exclude.add(lease.target.address)
            if not self._router.prefill.usable(self._fits, exclude):
                raise failure

    async def _acquire(self, children: Sequence[Child], exclude: set[str]) -> Lease:
        work = {child.prompt_index: max(1, child.prompt_tokens - child.cached_tokens) for child in children}
        try:
            limits = self._router.limits
            return await self._router.prefill.acquire(
                sum(work.values()),
                limits.prefill_queue_s,
                self._fits,
                exclude,
                admitted=True,
                no_engine_s=limits.no_prefill_s,
            )
        except ProxyError as error:
            raise AttemptError(error.answer, str(error), Blame.PROXY) from error

    def _fits(self, target: Target) -> bool:
        return pair_conflict(target, self._decode.target) is None

    async def _send(self, target: Target, children: Sequence[Child], number: int) -> None:
        # Two waves may be on one engine at a time, and engine request ids must differ.
        base = self._ids.x_request_id
        ids = LegIds(self._ids.rendezvous_id, base if number == 0 else f"{base}-w{number}")
        body = encode(prefill_body(self._request, ids, children))
        headers = leg_headers(self._headers, ids.x_request_id)
        path, timeout_s = self._request.api.value, self._router.limits.prefill_s
        await run_prefill(self._router.session, target.address, path, body, headers, timeout_s)


def _meta_refused(error: Exception) -> AttemptError:
    return AttemptError(ErrorAnswer.make(503, f"meta service: {error}", 1), str(error), Blame.PROXY)


def _next(events: AsyncIterator[RendezvousEvent]) -> asyncio.Future[RendezvousEvent]:
    return asyncio.ensure_future(anext(events))


async def _wait_any(tasks: set[asyncio.Future[Any]], timeout_s: float | None) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    elif timeout_s is not None:
        await asyncio.sleep(timeout_s)
