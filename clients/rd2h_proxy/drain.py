"""The end of the proxy: requests in flight get time to end, and then a word instead of a cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rd2h_proxy.errors import ErrorAnswer
from rd2h_proxy.failure import AttemptError, Blame

STOPPING = "the proxy is stopping"


class StoppingError(AttemptError):
    """A request that is not done when the drain time is over (503)."""

    def __init__(self) -> None:
        super().__init__(ErrorAnswer.make(503, STOPPING, 1), STOPPING, Blame.STOPPING)


class Drain:
    """Knows the task of every request. `run` lets them end, and interrupts those that do not.

    An interrupted request sees a cancellation, as when its client goes away; `interrupted` tells the two apart.
    """

    def __init__(self) -> None:
        self._requests: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
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
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are served by tasks")
        self._requests.add(task)
        try:
            yield
        finally:
            self._requests.discard(task)
            self._interrupted.discard(task)

    def interrupted(self) -> bool:
        """Called with a cancellation in hand: whether it is ours. If so it is used up, and the task may go on."""
        task = asyncio.current_task()
        if task is None or task not in self._interrupted:
            return False
        self._interrupted.discard(task)
        # Not when the client goes away in the same moment.
        return task.uncancel() == 0

    async def run(self, limit_s: float, last_words_s: float) -> None:
        """Returns when all requests have ended: by themselves within `limit_s`, or told within `last_words_s` more."""
        await self._wait(limit_s)
        self.over = True
        for task in self._requests:
            self._interrupted.add(task)
            task.cancel(STOPPING)
        await self._wait(last_words_s)

    async def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self._requests and (left_s := end - time.monotonic()) > 0:
            await asyncio.wait(set(self._requests), timeout=left_s)
