"""Giving up a call: nothing that it brought is dropped."""

import asyncio

import pytest
from rd2h_proxy.failure import AttemptError
from rd2h_proxy.loss import unless_lost
from rd2h_proxy.target import Role, Target


async def test_a_result_that_comes_in_the_moment_of_the_cancellation_is_handed_to_discard() -> None:
    gate = asyncio.Event()
    dropped: list[str] = []

    async def call() -> str:
        await gate.wait()
        return "an open connection"

    task = asyncio.create_task(unless_lost(Target(Role.PREFILL, "h:1", 1), call(), dropped.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert dropped == ["an open connection"]


async def test_a_result_in_time_is_returned_and_not_discarded() -> None:
    async def call() -> str:
        return "fine"

    target = Target(Role.PREFILL, "h:1", 1)
    assert await unless_lost(target, call(), lambda _: pytest.fail("discarded")) == "fine"
    assert not target._on_lost


async def test_a_lost_target_cancels_the_call_and_names_the_engine() -> None:
    target = Target(Role.PREFILL, "h:1", 1)
    cancelled = asyncio.Event()

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(unless_lost(target, call()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    target.lost("it was restarted")
    with pytest.raises(AttemptError, match="prefill engine h:1: it was restarted"):
        await task
    assert cancelled.is_set()
