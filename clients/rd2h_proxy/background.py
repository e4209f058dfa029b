"""Short tasks that outlive the request which started them, bounded in number and awaited at shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Background:
    """Holds the tasks, so that none is lost or forgotten. Beyond `limit` new ones are dropped and counted."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0
        self.failed = 0
        """Ends that the meta service was not told of, or refused."""

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` on its own."""
        if len(self._tasks) >= self._limit:
            self.dropped += 1
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", exc_info=error)

    async def close(self, timeout_s: float) -> None:
        """Lets the tasks finish, at most `timeout_s`, then cancels them."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
