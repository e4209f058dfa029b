"""The end of the proxy: requests in flight get time to end, and then a word instead of a cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rd2h_proxy.errors import ErrorAnswer
from rd2h_proxy.failure import AttemptError, Blame

STOPPING = "the proxy is stopping"


class StoppingError(AttemptError):
    """A request that is not done when the drain time is over (503)."""

    def __init__(self) -> None:
        super().__init__(ErrorAnswer.make(503, STOPPING, 1), STOPPING, Blame.STOPPING)


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in flight."""

    task: asyncio.Task[Any]
    writing: Callable[[], bool] = _never
    """Whether it is writing to its client. That is not interrupted, for what was not written then would be lost: the
    request looks at `interrupted` itself when the write has ended."""
    interrupted: bool = False
    """Whether its time is over."""
    cancelled: bool = False
    """Whether its task was cancelled for that, and has not said yet that it knows (`Drain.took_cancellation`)."""


class Drain:
    """Knows the task of every request. `run` lets them end, and interrupts those that do not.

    An interrupted request sees a cancellation, as when its client goes away; `took_cancellation` tells the two apart.
    """

    def __init__(self) -> None:
        self._tickets: dict[asyncio.Task[Any], Ticket] = {}
        self.over = False
        """Whether the drain time has passed."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around everything that the present task does for one request.

        Raises:
            StoppingError: it comes too late.
        """
        if self.over:
            raise StoppingError
        task = _present_task()
        self._tickets[task] = Ticket(task)
        try:
            yield
        finally:
            del self._tickets[task]

    def ticket(self) -> Ticket:
        """The present task's."""
        return self._tickets[_present_task()]

    def took_cancellation(self) -> bool:
        """Called with a cancellation in hand: whether it is ours. If so it is used up, and the task may go on."""
        ticket = self._tickets.get(_present_task())
        if ticket is None or not ticket.cancelled:
            return False
        ticket.cancelled = False
        # Not when the client goes away in the same moment.
        return ticket.task.uncancel() == 0

    async def run(self, limit_s: float, last_words_s: float) -> None:
        """Returns when all requests have ended: by themselves within `limit_s`, or told within `last_words_s` more."""
        await self._wait(limit_s)
        self.over = True
        for ticket in self._tickets.values():
            ticket.interrupted = True
            if not ticket.writing():
                ticket.cancelled = True
                ticket.task.cancel(STOPPING)
        await self._wait(last_words_s)

    async def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self._tickets and (left_s := end - time.monotonic()) > 0:
            await asyncio.wait(set(self._tickets), timeout=left_s)


def _present_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("requests are served by tasks")
    return task
