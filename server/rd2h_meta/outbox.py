"""What waits to be written to one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeVar

from rd2h_client.v1.rendezvous_pb2 import ExchangeResponse, OperationResult, RendezvousEvent

MAX_ENTRIES_PER_MESSAGE = 2_000
"""Results and events in one message. An entry stays below 2 KiB, so a message stays below gRPC's usual 4 MiB."""


T = TypeVar("T")


class Outbox:
    """Results and events for one stream, bounded. Everything pending goes into the next message."""

    def __init__(self, capacity: int) -> None:
        """`capacity` bounds results and events together; see `overflowed`."""
        self._room = capacity
        self._succeeded: list[int] = []
        self._results: deque[OperationResult] = deque()
        self._events: deque[RendezvousEvent] = deque()
        self._ready = asyncio.Event()
        self.overflowed = False
        """True when the peer reads too slowly: the stream must end."""
        self.closed = False
        """True when nothing more will be put in."""

    def put_event(self, event: RendezvousEvent) -> None:
        """Queue an event."""
        if self._take_room():
            self._events.append(event)

    def put_result(self, result: OperationResult) -> None:
        """Queue a result."""
        if self._take_room():
            self._results.append(result)

    def put_success(self, op_id: int) -> None:
        """Queue the news that an operation was applied."""
        if self._take_room():
            self._succeeded.append(op_id)

    def close(self) -> None:
        """Let `take` return None once everything is taken."""
        self.closed = True
        self._ready.set()

    async def take(self) -> ExchangeResponse | None:
        """Wait for something to write and return it; None when closed and empty, or overflowed."""
        while not (self._succeeded or self._results or self._events):
            if self.closed or self.overflowed:
                return None
            self._ready.clear()
            await self._ready.wait()
        if self.overflowed:
            return None
        succeeded, self._succeeded = self._succeeded, []
        results = _take(self._results, MAX_ENTRIES_PER_MESSAGE)
        events = _take(self._events, MAX_ENTRIES_PER_MESSAGE - len(results))
        self._room += len(succeeded) + len(results) + len(events)
        response = ExchangeResponse(succeeded=succeeded, results=results)
        response.events.extend(events)
        return response

    def _take_room(self) -> bool:
        self._ready.set()
        self._room -= 1
        if self._room < 0:
            self.overflowed = True
        return not self.overflowed


def _take(queue: deque[T], limit: int) -> list[T]:
    if len(queue) <= limit:
        taken = list(queue)
        queue.clear()
        return taken
    return [queue.popleft() for _ in range(limit)]
