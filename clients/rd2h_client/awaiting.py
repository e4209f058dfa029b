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
    RendezvousEvent,
)

_SEVERITY = {
    outcome: rank for rank, outcome in enumerate((OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_EXPIRED, OUTCOME_FAILED))
}
"""Outcomes from the mildest to the worst: a rendezvous ends like its worst child. Unknown ones are worse still."""


class ChildrenIterator:
    """Events of one awaited rendezvous. Each child comes once and ends at most once, COMPLETE comes once, and the
    iteration ends after `closed`, however often the connection or the service was lost on the way.

    The service tells of the children; that they are complete and that all have ended is concluded here, so that it
    does not depend on what a restarted service remembers. Holds at most four events per expected child, and two more.
    """

    __slots__ = (
        "_children",
        "_complete",
        "_ended",
        "_error",
        "_events",
        "_expected",
        "_forget",
        "_loop",
        "_over",
        "_rendezvous_id",
        "_waiter",
    )

    def __init__(
        self, rendezvous_id: str, expected_children: int, forget: Callable[[str], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`forget` is called with the rendezvous id when the iterator is closed early; `loop` is the running one."""
        self._rendezvous_id = rendezvous_id
        self._expected = expected_children
        self._forget = forget
        self._loop = loop
        self._events: deque[RendezvousEvent] = deque()
        self._children: dict[str, tuple[Outcome, str] | None] = {}
        """By request id: None while a child lives, then how it ended. (The event belongs to its taker, and would keep
        the whole message that brought it in memory.)"""
        self._ended = 0
        self._complete = False
        self._over = False
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
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return events.popleft()

    async def aclose(self) -> None:
        """Stop awaiting; the rendezvous goes on until it is cancelled or its time limit passes."""
        if not self._over and self._error is None:  # else it is forgotten, and may be awaited by another
            self._forget(self._rendezvous_id)
        self._over = True
        self._events.clear()
        self._wake()

    def offer(self, event: RendezvousEvent) -> bool:
        """See AwaitSink.

        Raises:
            ValueError: the service tells of ever more children.
        """
        kind = event.WhichOneof("event")
        if kind == "advertised":
            request_id = event.advertised.request_id
            if request_id in self._children:
                return False
            self._children[request_id] = None
        elif kind == "child_ended":
            ended = event.child_ended
            if self._children.get(ended.request_id) is not None:
                return False
            self._children[ended.request_id] = (ended.outcome, ended.reason)
            self._ended += 1
        elif kind == "complete":
            if self._complete:
                return False
            self._complete = True
        elif kind == "closed":
            self._over = True
        else:
            return False
        self._events.append(event)
        if len(self._children) >= self._expected:
            self._conclude()
        if self._waiter is not None:
            self._wake()
        return self._over

    def fail(self, error: MetaError) -> None:
        """See AwaitSink."""
        self._error = error
        self._wake()

    def _conclude(self) -> None:
        """All children are known."""
        if len(self._children) > 2 * self._expected:
            # After a restart of both, Decode's children may come under other ids; but not without end.
            raise ValueError(f"{len(self._children)} children advertised or ended, expected {self._expected}")
        if not self._complete:
            self._complete = True
            event = RendezvousEvent(rendezvous_id=self._rendezvous_id)
            event.complete.live_children = len(self._children) - self._ended
            event.complete.SetInParent()  # also when none lives
            self._events.append(event)
        if self._ended >= self._expected and not self._over:
            self._over = True
            outcome, reason = max((end for end in self._children.values() if end is not None), key=_severity)
            event = RendezvousEvent(rendezvous_id=self._rendezvous_id)
            event.closed.outcome = outcome
            event.closed.reason = reason
            self._events.append(event)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _severity(end: tuple[Outcome, str]) -> int:
    return _SEVERITY.get(end[0], len(_SEVERITY))
