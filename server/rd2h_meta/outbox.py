"""What waits to be written to one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeVar

from rd2h_client.v1.rendezvous_pb2 import ExchangeResponse, OperationResult

from rd2h_meta.rendezvous_events import Event

MAX_ENTRIES_PER_MESSAGE = 2_000
"""Results and events in one message. An entry stays below 2 KiB, so a message stays below gRPC's usual 4 MiB."""

RELAXED_DELAY_S = 0.02
"""How long the news that operations were applied waits when nobody waits for it. See ExchangeRequest.relaxed."""

T = TypeVar("T")


class Outbox:
    """Refusals and events for one stream, bounded. Everything pending goes into the next message."""

    def __init__(self, capacity: int) -> None:
        """`capacity` bounds refusals and events together; see `overflowed`."""
        self._loop = asyncio.get_running_loop()
        self.room = capacity
        """Entries that still fit in."""
        self.crowded_room = capacity // 2
        """Less room than this is for what others bring about: the peer's own operations wait, see `wait_for_room`."""
        self._room_back = asyncio.Event()
        self._operations_done = 0
        self._operations_told = 0
        self._relaxed_timer: asyncio.TimerHandle | None = None
        self._news = False
        self._refusals: deque[OperationResult] = deque()
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()
        self.overflowed = False
        """True when the peer reads too slowly: the stream must end."""
        self.closed = False
        """True when nothing more will be put in."""

    def put_event(self, event: Event) -> None:
        """Queue an event."""
        if self._take_room():
            self._events.append(event)

    def put_refusal(self, refusal: OperationResult) -> None:
        """Queue a refusal."""
        if self._take_room():
            self._refusals.append(refusal)

    def note_done(self, operations_done: int, relaxed: bool) -> None:
        """So many operations of this stream have been applied or refused. `relaxed` news waits for others, but not
        long."""
        self._operations_done = operations_done
        if self._news:
            return
        if not relaxed:
            self._tell()
        elif self._relaxed_timer is None:
            self._relaxed_timer = self._loop.call_later(RELAXED_DELAY_S, self._tell)

    def close(self) -> None:
        """Let `take` return None once everything is taken."""
        self.closed = True
        self._tell()

    async def wait_for_room(self) -> None:
        """Wait until the peer has read enough of what its own operations brought about."""
        while self.room < self.crowded_room and not self.overflowed:
            self._room_back.clear()
            await self._room_back.wait()

    async def take(self) -> ExchangeResponse | None:
        """Wait for something to write and return it; None when closed and empty, or overflowed."""
        while True:
            while not self._news:
                self._ready.clear()
                await self._ready.wait()
            if self.overflowed:
                return None
            response = self._next_message()
            self._news = bool(self._refusals or self._events or self.closed)
            if response is not None or self.closed:
                return response

    def _next_message(self) -> ExchangeResponse | None:
        refusals = _take(self._refusals, MAX_ENTRIES_PER_MESSAGE)
        events = _take(self._events, MAX_ENTRIES_PER_MESSAGE - len(refusals))
        # A refused operation must not be counted as done before its refusal is told.
        news_of_done = self._operations_done != self._operations_told and not self._refusals
        if not (refusals or events or news_of_done):
            return None
        self.room += len(refusals) + len(events)
        self._room_back.set()
        response = ExchangeResponse(results=refusals)
        add_event = response.events.add
        for event in events:
            event.write(add_event())
        if news_of_done:
            response.operations_done = self._operations_told = self._operations_done
        return response

    def _take_room(self) -> bool:
        if not self._news:
            self._tell()
        self.room -= 1
        if self.room >= 0:
            return True
        # The writer may be held up for as long as the connection lives: nothing may pile up meanwhile.
        self.overflowed = True
        self._refusals.clear()
        self._events.clear()
        return False

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
