"""What waits to be written to one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeVar

from rd2h_client.v1.rendezvous_pb2 import ExchangeResponse, OperationResult, RendezvousEvent

MAX_ENTRIES_PER_MESSAGE = 2_000
"""Results and events in one message. An entry stays below 2 KiB, so a message stays below gRPC's usual 4 MiB."""


RELAXED_DELAY_S = 0.02
"""How long the news of success waits when nobody waits for it. See Operation.relaxed."""

T = TypeVar("T")


class Outbox:
    """Results and events for one stream, bounded. Everything pending goes into the next message."""

    def __init__(self, capacity: int) -> None:
        """`capacity` bounds results and events together; see `overflowed`."""
        self._room = capacity
        self._succeeded: list[int] = []
        self._relaxed_timer: asyncio.TimerHandle | None = None
        self._news = False
        self._results: deque[OperationResult] = deque()
        self._events: deque[RendezvousEvent] = deque()
        self._ready = asyncio.Event()
        self.overflowed = False
        """True when the peer reads too slowly: the stream must end."""
        self.closed = False
        """True when nothing more will be put in."""

    def put_event(self, event: RendezvousEvent) -> None:
        """Queue an event."""
        self._room -= 1
        if self._room < 0:
            self._overflow()
            return
        self._events.append(event)
        if not self._news:
            self._tell()

    def put_result(self, result: OperationResult) -> None:
        """Queue a result."""
        if self._take_room():
            self._results.append(result)

    def put_success(self, op_id: int, relaxed: bool) -> None:
        """Queue the news that an operation was applied. `relaxed` news waits for others, but not long."""
        if not relaxed:
            if self._take_room():
                self._succeeded.append(op_id)
            return
        self._room -= 1
        self._succeeded.append(op_id)
        if self._room < 0:
            self._overflow()
        elif self._relaxed_timer is None and not self._news:
            self._relaxed_timer = asyncio.get_running_loop().call_later(RELAXED_DELAY_S, self._tell)

    def close(self) -> None:
        """Let `take` return None once everything is taken."""
        self.closed = True
        self._tell()

    async def take(self) -> ExchangeResponse | None:
        """Wait for something to write and return it; None when closed and empty, or overflowed."""
        while not self._news:
            self._ready.clear()
            await self._ready.wait()
        if self.overflowed or not (self._succeeded or self._results or self._events):
            return None
        succeeded, self._succeeded = self._succeeded, []
        results = _take(self._results, MAX_ENTRIES_PER_MESSAGE)
        events = _take(self._events, MAX_ENTRIES_PER_MESSAGE - len(results))
        self._room += len(succeeded) + len(results) + len(events)
        self._news = bool(self._results or self._events or self.closed)
        response = ExchangeResponse(succeeded=succeeded, results=results)
        response.events.extend(events)
        return response

    def _take_room(self) -> bool:
        if not self._news:
            self._tell()
        self._room -= 1
        if self._room < 0:
            self._overflow()
        return not self.overflowed

    def _overflow(self) -> None:
        self.overflowed = True
        self._tell()

    def _tell(self) -> None:
        """Let `take` go on: there is something that must not wait."""
        self._news = True
        self._ready.set()
        if self._relaxed_timer is not None:
            self._relaxed_timer.cancel()
            self._relaxed_timer = None


def _take(queue: deque[T], limit: int) -> list[T]:
    if len(queue) <= limit:
        taken = list(queue)
        queue.clear()
        return taken
    return [queue.popleft() for _ in range(limit)]
