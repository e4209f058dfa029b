"""Requests that cannot be split run whole on a Prefill engine, which is an ordinary engine for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rd2h_proxy.answer_leg import EngineAnswer, open_answer
from rd2h_proxy.engine_http import leg_headers
from rd2h_proxy.failure import AttemptError, Blame, engine_failure
from rd2h_proxy.journal import RequestRecord
from rd2h_proxy.judgement import judge
from rd2h_proxy.leg_body import PROXY_OWNED, LegIds, encode
from rd2h_proxy.loss import unless_lost
from rd2h_proxy.openai_request import OpenAiRequest
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import Lease
from rd2h_proxy.router import Router


class WholeAttempt:
    """The counterpart of `Attempt` with one leg and no rendezvous."""

    def __init__(
        self,
        router: Router,
        request: OpenAiRequest,
        ids: LegIds,
        lease: Lease,
        client_headers: Mapping[str, str],
        record: RequestRecord,
    ) -> None:
        self._router = router
        self._request = request
        self._ids = ids
        self._lease = lease
        self._headers = client_headers
        self._record = record
        self._answer: EngineAnswer | None = None
        self._stop_watching: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def answer(self) -> EngineAnswer:
        """Sends the request and returns the answer once its first bytes are there.

        Raises:
            AttemptError: there will be none.
        """
        self._record.enter(Phase.RENDEZVOUS)
        self._record.enter(Phase.PREFILL)
        target = self._lease.target
        body = encode({key: value for key, value in self._request.body.items() if key not in PROXY_OWNED})
        headers = leg_headers(self._headers, self._ids.x_request_id)
        path = self._request.api.value
        call = open_answer(self._router.session, Blame.PREFILL, target.address, path, body, headers)
        try:
            answer = await unless_lost(target, call, lambda unread: unread.end(clean=False))
        except AttemptError as failure:
            judge(self._lease, Blame.PREFILL, failure, self._request, begun=False)
            raise
        self._lease.succeeded()
        self._answer = answer
        self._stop_watching = target.watch_loss(
            lambda reason: answer.fail(engine_failure(Blame.PREFILL, target.address, reason))
        )
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
        if self._answer is not None:
            self._answer.end(clean=error is None)
