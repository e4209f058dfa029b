"""The end of the proxy: whose cancellation is whose."""

from __future__ import annotations

import asyncio

import pytest
from rd2h_proxy.drain import Drain, StoppingError


async def serve(drain: Drain, ends: list[str]) -> None:
    with drain.request():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("ours" if drain.took_cancellation() else "not ours")
            ends.append(str(asyncio.current_task().cancelling()))  # type: ignore[union-attr]
            # A second question must not use up the next cancellation.
            ends.append("ours" if drain.took_cancellation() else "not ours")


@pytest.mark.parametrize(
    ("by_drain", "by_others", "expected"),
    [
        (True, 0, ["ours", "0", "not ours"]),
        (True, 1, ["not ours", "1", "not ours"]),
        (False, 1, ["not ours", "1", "not ours"]),
    ],
)
async def test_a_cancellation_is_ours_only_when_nobody_else_cancelled(
    by_drain: bool, by_others: int, expected: list[str]
) -> None:
    drain, ends = Drain(), []  # type: ignore[var-annotated]
    task = asyncio.create_task(serve(drain, ends))
    await asyncio.sleep(0)
    run = asyncio.create_task(drain.run(0.0, 1.0)) if by_drain else None
    if run is not None:
        while not drain.over:
            await asyncio.sleep(0)
    for _ in range(by_others):
        task.cancel()
    await asyncio.wait({task})
    if run is not None:
        await run
    assert ends == expected


async def test_without_requests_the_end_comes_at_once() -> None:
    drain = Drain()
    async with asyncio.timeout(1):
        await drain.run(60, 60)
    with pytest.raises(StoppingError), drain.request():
        raise AssertionError("too late")


async def test_a_write_is_not_interrupted_but_not_waited_for_beyond_the_last_words() -> None:
    drain, written = Drain(), asyncio.Event()

    async def write() -> bool:
        with drain.request():
            drain.ticket().writing = lambda: True
            await written.wait()
            return drain.ticket().interrupted

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await drain.run(0.05, 0.05)
    assert not task.done()
    written.set()
    assert await task
