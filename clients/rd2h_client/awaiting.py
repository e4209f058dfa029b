"""The waiting side of a rendezvous, as an asynchronous iterator without duplicates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rd2h_client.errors import MetaError
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    Outcome,
    RendezvousClosed,
    RendezvousComplete,
    RendezvousEvent,
)

_SEVERITY = {
    outcome: rank for rank, outcome in enumerate((OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_EXPIRED, OUTCOME_FAILED))
}
"""Outcomes from the mildest to the worst: a rendezvous ends like its worst child. Unknown ones are worse still."""


class ChildrenIterator:
    """Events of one awaited rendezvous. Each child comes once and ends at most once, COMPLETE comes once, and the
    iteration ends after `closed`, however often the connection or the service was lost on the way.

    Holds at most two events per expected child, and two more.
    """

    __slots__ = (
        "_advertised",
        "_complete",
        "_ended",
        "_error",
        "_events",
        "_expected",
        "_forget",
        "_over",
        "_rendezvous_id",
        "_resumed",
        "_waiter",
    )

    def __init__(self, rendezvous_id: str, expected_children: int, forget: Callable[[str], None]) -> None:
        """`forget` is called with the rendezvous id when the iterator is closed early."""
        self._rendezvous_id = rendezvous_id
        self._expected = expected_children
        self._forget = forget
        self._events: deque[RendezvousEvent] = deque()
        self._advertised: set[str] = set()
        self._ended: dict[str, tuple[Outcome, str]] = {}
        self._complete = False
        self._over = False
        self._resumed = False
        self._error: MetaError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> ChildrenIterator:
        return self

    async def __anext__(self) -> RendezvousEvent:
        events = self._events
        while not events:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            await self._wait()
        return events.popleft()

    async def aclose(self) -> None:
        """Stop awaiting; the rendezvous goes on until it is cancelled or its time limit passes."""
        self._over = True
        self._events.clear()
        self._forget(self._rendezvous_id)
        self._wake()

    def offer(self, event: RendezvousEvent) -> bool:
        """See AwaitSink."""
        kind = event.WhichOneof("event")
        if kind == "advertised":
            request_id = event.advertised.request_id
            if request_id in self._advertised or request_id in self._ended:
                return False
            self._advertised.add(request_id)
        elif kind == "child_ended":
            ended = event.child_ended
            if ended.request_id in self._ended:
                return False
            self._ended[ended.request_id] = (ended.outcome, ended.reason)
        elif kind == "complete":
            if self._complete:
                return False
            self._complete = True
        elif kind == "closed":
            self._over = True
        else:
            return False
        self._push(event)
        if self._resumed:
            self._derive()
        return self._over

    def fail(self, error: MetaError) -> None:
        """See AwaitSink."""
        self._error = error
        self._wake()

    def resume(self) -> None:
        """See AwaitSink."""
        self._resumed = True

    def _derive(self) -> None:
        """A restarted service may not know of children that ended before: conclude what it cannot say."""
        known = self._advertised | self._ended.keys()
        if len(known) >= self._expected and not self._complete:
            self._complete = True
            complete = RendezvousComplete(live_children=len(known) - len(self._ended))
            self._push(RendezvousEvent(rendezvous_id=self._rendezvous_id, complete=complete))
        if len(self._ended) >= self._expected and not self._over:
            self._over = True
            outcome, reason = max(self._ended.values(), key=lambda end: _SEVERITY.get(end[0], len(_SEVERITY)))
            closed = RendezvousClosed(outcome=outcome, reason=reason)
            self._push(RendezvousEvent(rendezvous_id=self._rendezvous_id, closed=closed))

    def _push(self, event: RendezvousEvent) -> None:
        self._events.append(event)
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
