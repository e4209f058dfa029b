"""Choice, concurrency limits and the queue."""

import asyncio
from collections import Counter

import pytest
from rd2h_proxy.errors import OverloadedError, UnavailableError
from rd2h_proxy.pool import EnginePool, Lease
from rd2h_proxy.target import ProbeState, Role, Target


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_pool(*limits: int, waiting: int = 10) -> EnginePool:
    pool = EnginePool(Role.DECODE, waiting, Clock())
    for number, limit in enumerate(limits):
        pool.add(Target(Role.DECODE, f"h{number}:1", limit, static=True))
    return pool


async def test_least_work_is_chosen_and_equals_take_turns() -> None:
    pool = make_pool(100, 100, 100)
    even = Counter([(await pool.acquire(10, 1)).target.address for _ in range(9)])
    assert even == {"h0:1": 3, "h1:1": 3, "h2:1": 3}
    heavy = await pool.acquire(1000, 1)
    rest = [(await pool.acquire(10, 1)).target.address for _ in range(8)]
    assert heavy.target.address not in rest


async def test_idle_equals_are_not_herded() -> None:
    pool = make_pool(10, 10)
    chosen = []
    for _ in range(4):
        with await pool.acquire(1, 1) as lease:
            chosen.append(lease.target.address)
    assert chosen == ["h0:1", "h1:1", "h0:1", "h1:1"]


async def test_limit_queues_and_release_serves_in_order() -> None:
    pool = make_pool(1)
    first = await pool.acquire(1, 1)
    order: list[int] = []

    async def wait(number: int) -> Lease:
        lease = await pool.acquire(1, 5)
        order.append(number)
        return lease

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert pool.waiting == 3
    first.release()
    first.release()
    for task in tasks:
        (await task).release()
    assert order == [0, 1, 2]
    assert [(target.in_flight, target.work_tokens) for target in pool.targets] == [(0, 0)]


async def test_full_queue_is_429_and_waiting_too_long_is_503() -> None:
    pool = make_pool(1, waiting=1)
    lease = await pool.acquire(1, 1)
    waiter = asyncio.create_task(pool.acquire(1, 0.05))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as full:
        await pool.acquire(1, 1)
    assert full.value.answer.status == 429
    with pytest.raises(UnavailableError) as late:
        await waiter
    assert late.value.answer.status == 503
    assert late.value.answer.retry_after_s
    assert pool.waiting == 0
    lease.release()


async def test_a_cancelled_waiter_loses_no_place() -> None:
    pool = make_pool(1)
    lease = await pool.acquire(1, 1)
    waiter = asyncio.create_task(pool.acquire(1, 5))
    await asyncio.sleep(0)
    lease.release()
    # The place is granted, but the waiter has not run yet.
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert [target.in_flight for target in pool.targets] == [0]


async def test_health_breaker_and_exclusion_keep_targets_out() -> None:
    pool = make_pool(5, 5, 5)
    targets = list(pool.targets)
    targets[0].probe = ProbeState.DOWN
    for _ in range(3):
        targets[1].breaker.failed(100.0)
    assert [target.address for target in pool.usable()] == ["h2:1"]
    with pytest.raises(UnavailableError, match=r"h0:1: its HTTP health check fails.*h1:1: its circuit breaker is open"):
        await pool.acquire(1, 0.01, exclude={"h2:1"})


async def test_a_picky_waiter_does_not_hold_up_the_next() -> None:
    pool = make_pool(1, 1)
    leases = [await pool.acquire(1, 1) for _ in range(2)]
    picky = asyncio.create_task(pool.acquire(1, 5, exclude={"h1:1"}))
    await asyncio.sleep(0)
    easy = asyncio.create_task(pool.acquire(1, 5))
    await asyncio.sleep(0)
    leases[1].release()
    assert (await easy).target.address == "h1:1"
    assert not picky.done()
    leases[0].release()
    assert (await picky).target.address == "h0:1"


async def test_decode_waiters_wake_when_prefill_becomes_usable() -> None:
    prefill = EnginePool(Role.PREFILL, 10, Clock())
    decode = EnginePool(Role.DECODE, 10, Clock(), depends_on=prefill)
    decode.add(Target(Role.DECODE, "d:1", 1, static=True))
    waiter = asyncio.create_task(decode.acquire(1, 5, fits=lambda _: bool(prefill.usable())))
    await asyncio.sleep(0)
    assert not waiter.done()
    prefill.add(Target(Role.PREFILL, "p:1", 1, static=True))
    assert (await waiter).target.address == "d:1"


async def test_waiting_for_room_ends_when_no_engine_is_usable() -> None:
    clock = Clock()
    pool = EnginePool(Role.PREFILL, 10, clock)
    pool.add(Target(Role.PREFILL, "h0:1", 1, static=True))
    (target,) = pool.targets
    held = await pool.acquire(1, 1)
    wait = asyncio.create_task(pool.acquire(1, 60, no_engine_s=6.0))
    await asyncio.wait({wait}, timeout=1.2)
    assert not wait.done(), "a full but usable engine is waited for"
    target.probe = ProbeState.DOWN
    clock.now += 7.0
    with pytest.raises(UnavailableError, match="no prefill engine was usable for 6 s"):
        await asyncio.wait_for(wait, 5)
    assert pool.waiting == 0
    held.release()


async def test_an_engine_that_comes_back_in_time_is_used() -> None:
    pool = make_pool(1)
    (target,) = pool.targets
    target.probe = ProbeState.DOWN
    wait = asyncio.create_task(pool.acquire(1, 60, no_engine_s=6.0))
    await asyncio.wait({wait}, timeout=0.7)
    target.probe = ProbeState.UP
    pool.wake()
    with await asyncio.wait_for(wait, 5) as lease:
        assert lease.target is target


async def test_a_long_queue_costs_nothing_while_no_engine_has_room() -> None:
    pool = EnginePool(Role.DECODE, 1000, lambda: 0.0)
    pool.add(Target(Role.DECODE, "h:1", 1, static=True))
    asked = 0

    def fits(_target: Target) -> bool:
        nonlocal asked
        asked += 1
        return True

    lease = await pool.acquire(1, 5, fits)
    waiters = [asyncio.create_task(pool.acquire(1, 5, fits)) for _ in range(500)]
    while pool.waiting < 500:
        await asyncio.sleep(0)
    asked = 0
    pool.wake()
    assert asked == 0
    lease.release()
    assert asked == 1
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert pool.waiting == 0


async def test_only_the_trial_itself_gives_its_place_to_the_next_trial() -> None:
    clock = Clock()
    pool = EnginePool(Role.DECODE, 10, clock)
    pool.add(Target(Role.DECODE, "h:1", 10, static=True))
    old = [await pool.acquire(1, 1) for _ in range(5)]
    for lease in old[:3]:
        lease.failed()
    clock.now += 60
    trial = await pool.acquire(1, 1)
    for lease in old:
        lease.release()  # the last two tell nothing: their clients went away
    assert not pool.usable(), "one request tries, not two"
    trial.release()
    assert pool.usable()


async def test_a_breaker_whose_pause_is_over_wakes_nobody_again_and_again() -> None:
    clock = Clock()
    prefill = EnginePool(Role.PREFILL, 10, clock)
    decode = EnginePool(Role.DECODE, 10, clock, depends_on=prefill)
    target = Target(Role.PREFILL, "p:1", 5, static=True)
    prefill.add(target)
    decode.add(Target(Role.DECODE, "d:1", 5, static=True))
    for _ in range(3):
        target.breaker.failed(clock.now)
    target.probe = ProbeState.DOWN
    asked = 0

    def fits(_target: Target) -> bool:
        nonlocal asked
        asked += 1
        return bool(prefill.usable())

    waiter = asyncio.create_task(decode.acquire(1, 5, fits))
    await asyncio.sleep(0)
    clock.now += 60
    decode.wake()
    asked = 0
    await asyncio.sleep(0.2)  # long enough for four rounds, were there any
    assert asked == 0
    target.probe = ProbeState.UP
    prefill.wake()
    (await waiter).release()
