"""How evenly different ways to choose an engine spread heavy-tailed work: a simulation with the proxy's own pool."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rd2h_proxy.pool import EnginePool, Lease
from rd2h_proxy.target import Role, Target

_ENGINES = 8
_UTILISATION = 0.8
_OUTPUT_GUESS = 256


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_s: float
    prompt_tokens: int
    """Known to the proxy only as an estimate."""
    output_tokens: int
    """Not known to anyone when the engine is chosen."""

    @property
    def work(self) -> int:
        """Tokens that the engine really computes."""
        return self.prompt_tokens + self.output_tokens


def arrivals(count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals with Pareto lengths, at 80 % of what the engines can do (one token a second each)."""
    rng = random.Random(seed)
    lengths = [(_pareto(rng, 100, 32_000), _pareto(rng, 30, 4_000)) for _ in range(count)]
    mean = statistics.fmean(prompt + output for prompt, output in lengths)
    rate = _ENGINES * _UTILISATION / mean
    made, now = [], 0.0
    for prompt, output in lengths:
        now += rng.expovariate(rate)
        made.append(Arrival(now, prompt, output))
    return made


def _pareto(rng: random.Random, least: int, most: int) -> int:
    return min(most, int(least * rng.paretovariate(1.1)))


@dataclass(frozen=True)
class Balance:
    """How evenly the work was spread."""

    max_over_mean: float
    """Backlog of the fullest engine over the mean backlog, averaged over the arrivals at which work for every engine
    was in the system (with less, an even spread is not possible)."""
    mean_max_backlog: float
    """Mean over all arrivals of the fullest engine's backlog, in tokens. The ratio above cannot fall far: one long
    request is a backlog of its own, and good choices shrink the mean below it as well."""
    assigned_max_over_mean: float
    """Work ever assigned to the engine with the most over the mean."""
    wait_p50: float
    """Median backlog in tokens that a request found on its engine."""
    wait_p99: float


def measure(work: list[Arrival], choose: Callable[[Arrival], int], finished: Callable[[int], None]) -> Balance:
    """Plays the arrivals; `choose` returns the engine, `finished` hears of the end of each request by number."""
    free_at = [0.0] * _ENGINES
    ends: list[tuple[float, int]] = []
    assigned = [0.0] * _ENGINES
    ratios, fullest, waits = [], [], []
    for number, arrival in enumerate(work):
        while ends and ends[0][0] <= arrival.at_s:
            finished(heapq.heappop(ends)[1])
        backlog = [max(0.0, at - arrival.at_s) for at in free_at]
        fullest.append(max(backlog))
        if len(ends) >= _ENGINES:
            ratios.append(max(backlog) / statistics.fmean(backlog))
        engine = choose(arrival)
        waits.append(backlog[engine])
        assigned[engine] += arrival.work
        free_at[engine] = max(free_at[engine], arrival.at_s) + arrival.work
        heapq.heappush(ends, (free_at[engine], number))
    cuts = statistics.quantiles(waits, n=100)
    spread = max(assigned) / statistics.fmean(assigned)
    return Balance(statistics.fmean(ratios), statistics.fmean(fullest), spread, cuts[49], cuts[98])


def least_work(work: list[Arrival], seed: int) -> Balance:
    """The proxy's pool, with prompt estimates that are off by up to a third and outputs that are only guessed."""
    rng = random.Random(seed)
    pool = EnginePool(Role.DECODE, 1, lambda: 0.0)
    for number in range(_ENGINES):
        pool.add(Target(Role.DECODE, f"engine:{number + 1}", len(work), static=True))
    leases: list[Lease] = []

    def choose(arrival: Arrival) -> int:
        estimate = round(arrival.prompt_tokens * rng.uniform(0.67, 1.33)) + _OUTPUT_GUESS
        lease = pool.try_acquire(estimate)
        if lease is None:
            raise RuntimeError("the pool is unlimited here and must have a place")
        leases.append(lease)
        return int(lease.target.address.split(":")[1]) - 1

    return measure(work, choose, lambda number: leases[number].release())


def round_robin(work: list[Arrival]) -> Balance:
    """One after the other."""
    turn = iter(range(len(work)))
    return measure(work, lambda _: next(turn) % _ENGINES, lambda _: None)


def at_random(work: list[Arrival], seed: int) -> Balance:
    """Any."""
    rng = random.Random(seed)
    return measure(work, lambda _: rng.randrange(_ENGINES), lambda _: None)


def compare(count: int, seed: int = 1) -> dict[str, Balance]:
    """All three on the same arrivals."""
    work = arrivals(count, seed)
    return {
        "least_work": least_work(work, seed + 1),
        "round_robin": round_robin(work),
        "random": at_random(work, seed + 1),
    }
