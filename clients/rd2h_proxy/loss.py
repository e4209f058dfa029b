"""Giving up a call as soon as the engine it waits for is known to be gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rd2h_proxy.failure import Blame, engine_failure
from rd2h_proxy.target import Role, Target

T = TypeVar("T")


async def unless_lost(target: Target, call: Coroutine[Any, Any, T], discard: Callable[[T], None] | None = None) -> T:
    """Awaits `call`. `discard` gets a result that comes in the moment of our own cancellation, when nobody takes it.

    Raises:
        AttemptError: the target was lost meanwhile; the call has been cancelled.
    """
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(call)

    def on_lost(reason: str) -> None:
        if not lost.done():
            lost.set_result(reason)

    stop_watching = target.watch_loss(on_lost)
    taken = False
    try:
        waiting: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            taken = True
            return task.result()
        blame = Blame.PREFILL if target.role is Role.PREFILL else Blame.DECODE
        raise engine_failure(blame, target.address, lost.result())
    finally:
        stop_watching()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not taken and discard is not None and not task.cancelled() and task.exception() is None:
            discard(task.result())
