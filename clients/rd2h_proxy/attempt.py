"""One attempt at a request: a Decode leg, its rendezvous, and the Prefill waves that feed it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rd2h_client.v1.rendezvous_pb2 import Outcome

from rd2h_proxy.answer_leg import EngineAnswer, open_answer
from rd2h_proxy.drain import STOPPING
from rd2h_proxy.engine_http import leg_headers
from rd2h_proxy.errors import ErrorAnswer
from rd2h_proxy.failure import AttemptError, Blame, engine_failure
from rd2h_proxy.feeder import Feeder
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.judgement import judge
from rd2h_proxy.leg_body import LegIds, decode_body, encode
from rd2h_proxy.meta_link import META_TROUBLE
from rd2h_proxy.openai_request import OpenAiRequest
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import Lease
from rd2h_proxy.router import Router

log = logging.getLogger(__name__)

# When both legs fail together, Decode often only reports what Prefill did; Prefill's own answer says more.
_PREFILL_VERDICT_S = 0.5
_META_CALL_S = 5.0


class Attempt:
    """Runs both legs. Leaving the `async with` block ends whatever is still going on, in the way it was left."""

    def __init__(
        self,
        router: Router,
        request: OpenAiRequest,
        ids: LegIds,
        lease: Lease,
        client_headers: Mapping[str, str],
        record: RequestRecord,
        exclude_prefill: frozenset[str],
    ) -> None:
        self._router = router
        self._request = request
        self._ids = ids
        self._lease = lease
        self._headers = client_headers
        self._record = record
        self._feeder = Feeder(router, request, ids, lease, client_headers, record, exclude_prefill)
        self._feed: asyncio.Task[None] | None = None
        self._answer: EngineAnswer | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stop_watching: Callable[[], None] | None = lease.target.watch_loss(self._target_lost)

    async def __aenter__(self) -> Self:
        return self

    def _target_lost(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
        if self._answer is not None:
            self._answer.fail(self._loss())

    def _loss(self) -> AttemptError:
        return engine_failure(Blame.DECODE, self._lease.target.address, self._lost.result())

    async def answer(self) -> EngineAnswer:
        """Starts both legs and returns Decode's answer once its first bytes are there.

        Raises:
            AttemptError: there will be none.
        """
        self._record.enter(Phase.RENDEZVOUS)
        feed = self._feed = asyncio.create_task(self._feeder.run(), name="feed")
        decode = asyncio.create_task(self._open(), name="decode-leg")
        try:
            await self._first_result(decode, feed)
            self._answer = decode.result()
        except AttemptError as failure:
            begun = self._feeder.arrived > 0
            judge(self._lease, Blame.DECODE, failure, self._request, begun)
            raise
        finally:
            if not decode.done():
                decode.cancel()
                await asyncio.wait({decode})
            if self._answer is None and not decode.cancelled() and decode.exception() is None:
                decode.result().end(clean=False)
        self._lease.succeeded()
        self._feeder.answer_began = True
        # From here on a failure of the feeding side has to cut the stream.
        feed.add_done_callback(self._feed_ended)
        if self._lost.done():
            self._answer.fail(self._loss())
        return self._answer

    async def _open(self) -> EngineAnswer:
        body = encode(decode_body(self._request, self._ids, self._router.metaserver))
        headers = leg_headers(self._headers, self._ids.x_request_id)
        address = self._lease.target.address
        return await open_answer(self._router.session, Blame.DECODE, address, self._request.api.value, body, headers)

    async def _first_result(self, decode: asyncio.Task[EngineAnswer], feed: asyncio.Task[None]) -> None:
        """Returns when the Decode leg is done; raises as soon as anything else makes an answer impossible."""
        waiting: set[asyncio.Future[Any]] = {decode, self._lost, feed}
        while not decode.done():
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if decode.done():
                break
            if self._lost.done():
                raise self._loss()
            if feed.done():
                feed.result()
                waiting.discard(feed)
        if decode.exception() is not None:
            await self._prefer_prefill_verdict(feed)

    async def _prefer_prefill_verdict(self, feed: asyncio.Task[None]) -> None:
        if self._feeder.dispatching:
            await asyncio.wait({feed}, timeout=_PREFILL_VERDICT_S)
        if feed.done():
            feed.result()

    def _feed_ended(self, feed: asyncio.Task[None]) -> None:
        if feed.cancelled() or self._answer is None:
            return
        error = feed.exception()
        if isinstance(error, AttemptError):
            self._answer.fail(error)
        elif error is not None:
            log.error("feeding of %s broke", self._ids.rendezvous_id, exc_info=error)
            self._answer.fail(
                AttemptError(
                    ErrorAnswer.make(500, "the proxy failed to follow the rendezvous"), repr(error), Blame.PROXY
                )
            )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            # It refers to us: the circle would keep the request, with its pictures, until the garbage collection.
            self._stop_watching = None
        if self._answer is not None:
            self._answer.end(clean=error is None)
        if self._feed is not None:
            self._feed.cancel()
        if not self._feeder.closed:
            # Before anything is awaited: a second cancellation must not keep the engines from being told.
            self._router.background.start(self._end_rendezvous(error))
        if self._feed is not None:
            await asyncio.wait({self._feed})
            if not self._feed.cancelled():
                # A failure that ended the attempt was raised by `answer`; one after a complete answer is moot.
                self._feed.exception()

    async def _end_rendezvous(self, error: BaseException | None) -> None:
        """Tells the meta service how the attempt ended, so that neither engine waits for the other."""
        api = self._router.meta.api
        rendezvous_id = self._ids.rendezvous_id
        try:
            async with asyncio.timeout(_META_CALL_S):
                if error is None:
                    await api.cancel(rendezvous_id, "the answer is complete", outcome=Outcome.OUTCOME_DONE)
                elif isinstance(error, AttemptError) and error.blame is not Blame.STOPPING:
                    await api.report_failure(rendezvous_id, str(error))
                else:
                    reason = STOPPING if self._router.drain.over else "the client went away"
                    await api.cancel(rendezvous_id, reason, outcome=Outcome.OUTCOME_ABORTED)
        except (*META_TROUBLE, TimeoutError) as problem:
            # The engines learn of the end by their closed connections too, and the service by its time limit.
            self._router.background.failed += 1
            log.warning("rendezvous %s could not be ended at the meta service: %s", rendezvous_id, problem)
