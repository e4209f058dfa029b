"""All targets of one role: choosing the least loaded, bounded concurrency, and the bounded queue before it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rd2h_proxy.errors import OverloadedError, UnavailableError
from rd2h_proxy.target import Role, Target

Filter = Callable[[Target], bool]

# How often a waiter with a limit on engines being away looks whether one is back.
_USABLE_CHECK_S = 0.5


def anything(_target: Target) -> bool:
    """The filter that lets every target through."""
    return True


class Lease:
    """A place on a target. Given back exactly once, with what it told about the target's health."""

    def __init__(self, pool: EnginePool, target: Target, work_tokens: int) -> None:
        self._pool = pool
        self._is_trial = target.breaker.started(pool.now())
        self.target = target
        self._work_tokens = work_tokens
        self._open = True
        self._judged = False

    def adjust_work(self, work_tokens: int) -> None:
        """Replaces the estimate by a better one."""
        if self._open:
            self.target.work_tokens += work_tokens - self._work_tokens
            self._work_tokens = work_tokens

    def succeeded(self) -> None:
        """The engine did its part."""
        if not self._judged:
            self._judged = True
            self.target.breaker.succeeded()

    def failed(self) -> None:
        """The engine is to blame for a failure."""
        if not self._judged:
            self._judged = True
            self.target.breaker.failed(self._pool.now())

    def release(self) -> None:
        """Gives the place back. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._is_trial and not self._judged:
            self.target.breaker.abandoned()
        self.target.in_flight -= 1
        self.target.work_tokens -= self._work_tokens
        self._pool.forget_if_gone(self.target)
        self._pool.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class _Waiter:
    work_tokens: int
    fits: Filter
    exclude: Collection[str]
    place: asyncio.Future[Lease]


class EnginePool:
    """Targets of one role.

    At most `max_waiting` requests wait for a place; more are refused with 429. Waiting is first come, first served,
    except that a request that cannot use the free place does not hold up one that can.
    """

    def __init__(
        self, role: Role, max_waiting: int, now: Callable[[], float], depends_on: EnginePool | None = None
    ) -> None:
        """`depends_on`: a pool whose changes may let our waiters through, as Decode places need a usable Prefill."""
        self.role = role
        self.now = now
        self._depends_on = depends_on
        self._dependents: list[EnginePool] = []
        if depends_on is not None:
            depends_on._dependents.append(self)
        self._targets: dict[str, Target] = {}
        self._waiters: deque[_Waiter] = deque()
        self._max_waiting = max_waiting
        self._choices = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def targets(self) -> Collection[Target]:
        """Every target, usable or not."""
        return self._targets.values()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiters)

    def get(self, address: str) -> Target | None:
        """The target with this host:port."""
        return self._targets.get(address)

    def add(self, target: Target) -> None:
        """Makes a target known; a known address is an error of the caller."""
        if target.address in self._targets:
            raise ValueError(f"{self.role.value} target {target.address} is already known")
        self._targets[target.address] = target
        self.wake()

    def forget_if_gone(self, target: Target) -> None:
        """Forgets a target that is neither registered nor named by the operator, and has no requests.

        While it has some it must stay watched.
        """
        if not target.static and not target.engines and target.in_flight == 0:
            self._targets.pop(target.address, None)

    def usable(self, fits: Filter = anything, exclude: Collection[str] = ()) -> list[Target]:
        """Targets that may take requests now, with or without room."""
        now = self.now()
        return [
            target
            for target in self._targets.values()
            if target.address not in exclude and target.unusable_reason(now) is None and fits(target)
        ]

    def describe_unusable(self) -> str:
        """One line saying why each target is out."""
        now = self.now()
        reasons = [f"{t.address}: {t.unusable_reason(now) or 'usable'}" for t in self._targets.values()]
        return "; ".join(reasons) or f"no {self.role.value} engine is known"

    def try_acquire(self, work_tokens: int, fits: Filter = anything, exclude: Collection[str] = ()) -> Lease | None:
        """A place if there is one now and nobody waits for one."""
        return None if self._waiters else self._place(work_tokens, fits, exclude)

    async def acquire(
        self,
        work_tokens: int,
        timeout_s: float,
        fits: Filter = anything,
        exclude: Collection[str] = (),
        admitted: bool = False,
        no_engine_s: float = math.inf,
    ) -> Lease:
        """Takes a place on the target with the least estimated work, waiting for one if need be.

        `admitted`: the request has a place on the other role already, whose limit bounds how many such wait here; to
        turn it away would waste what the other engine has done. `no_engine_s`: waiting for room makes sense only while
        some engine is usable; after so long without one the wait ends.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: no place became free within `timeout_s`, or no engine was usable for `no_engine_s`.
        """
        if (lease := self.try_acquire(work_tokens, fits, exclude)) is not None:
            return lease
        if not admitted and len(self._waiters) >= self._max_waiting:
            raise OverloadedError(f"{len(self._waiters)} requests already wait for a {self.role.value} engine")
        waiter = _Waiter(work_tokens, fits, exclude, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.wake()
        granted = False
        try:
            async with asyncio.timeout(timeout_s):
                lease = await self._granted(waiter, no_engine_s)
            granted = True
            return lease
        except TimeoutError:
            raise UnavailableError(
                f"no {self.role.value} engine was free within {timeout_s:g} s ({self.describe_unusable()})"
            ) from None
        finally:
            if not granted:
                self._forget(waiter)

    async def _granted(self, waiter: _Waiter, no_engine_s: float) -> Lease:
        usable_at = self.now()
        while not waiter.place.done():
            await asyncio.wait({waiter.place}, timeout=None if no_engine_s == math.inf else _USABLE_CHECK_S)
            if self.usable(waiter.fits, waiter.exclude):
                usable_at = self.now()
            elif not waiter.place.done() and self.now() - usable_at >= no_engine_s:
                raise UnavailableError(
                    f"no {self.role.value} engine was usable for {no_engine_s:g} s ({self.describe_unusable()})"
                )
        return waiter.place.result()

    def _forget(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        # Cancelled or timed out in the moment the place was granted: nobody else would give it back.
        if waiter.place.done() and not waiter.place.cancelled():
            waiter.place.result().release()

    def wake(self) -> None:
        """Hands free places to waiters. Called whenever a target may have become able to take a request."""
        free = self._has_free_target()
        for waiter in list(self._waiters):
            # A long queue meets every release: most of them leave nothing to hand out, and must cost little.
            if not free:
                break
            if waiter.place.done():
                continue
            lease = self._place(waiter.work_tokens, waiter.fits, waiter.exclude)
            if lease is not None:
                self._waiters.remove(waiter)
                waiter.place.set_result(lease)
                free = self._has_free_target()
            elif not waiter.exclude and waiter.fits is anything:
                break
        self._arm_timer()
        for pool in self._dependents:
            pool.wake()

    def _arm_timer(self) -> None:
        # An open breaker becomes usable by the passing of time alone, which no event announces.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiters:
            return
        targets = [*self._targets.values(), *(self._depends_on.targets if self._depends_on is not None else ())]
        now = self.now()
        # One whose pause is over keeps nobody waiting any more; what does, is announced.
        wakes = [at for target in targets if (at := target.breaker.wakes_at()) is not None and at > now]
        if wakes:
            delay_s = max(0.05, min(wakes) - now)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.wake)

    def _has_free_target(self) -> bool:
        now = self.now()
        return any(target.has_room() and target.unusable_reason(now) is None for target in self._targets.values())

    def _place(self, work_tokens: int, fits: Filter, exclude: Collection[str]) -> Lease | None:
        free = [target for target in self.usable(fits, exclude) if target.has_room()]
        if not free:
            return None
        # Decode without room for the KV would keep the request in its queue while another could begin at once.
        roomy = [target for target in free if not target.lacks_kv_room(work_tokens)]
        target = least_work(roomy or free)
        self._choices += 1
        target.chosen_at = self._choices
        target.in_flight += 1
        target.work_tokens += work_tokens
        return Lease(self, target, work_tokens)


def least_work(targets: Iterable[Target]) -> Target:
    """The target with the least estimated work; among equals the one chosen longest ago, so that none is herded."""
    return min(targets, key=lambda target: (target.work_tokens, target.in_flight, target.chosen_at))
