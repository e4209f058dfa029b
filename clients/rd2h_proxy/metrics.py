"""Prometheus metrics of the proxy, in the text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rd2h_proxy.breaker import BreakerState
from rd2h_proxy.journal import Journal, RequestRecord
from rd2h_proxy.phase import Phase
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.router import Router
from rd2h_proxy.target import Target

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.TRIAL: 1, BreakerState.OPEN: 2}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Histogram:
    """Counts of durations in fixed buckets."""

    edges_s: Sequence[float] = _SECONDS
    counts: list[int] = field(init=False)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges_s) + 1)

    def observe(self, seconds: float) -> None:
        """Takes in one duration."""
        self.counts[bisect_left(self.edges_s, seconds)] += 1
        self.total_s += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Cumulative buckets, sum and count."""
        running = 0
        for edge, count in zip((*(f"{edge:g}" for edge in self.edges_s), "+Inf"), self.counts, strict=True):
            running += count
            yield f'{name}_bucket{{{labels}{"," if labels else ""}le="{edge}"}} {running}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.total_s:.6f}"
        yield f"{name}_count{braces} {running}"


class ProxyMetrics:
    """Takes in finished requests and reads everything else where it lives. Labels have few values by design."""

    def __init__(self, router: Router, journal: Journal) -> None:
        self._router = router
        self._journal = journal
        self._phases = {phase: Histogram() for phase in Phase if not phase.final}
        self._first_byte = Histogram()
        self._total = Histogram()
        self._requests: Counter[tuple[str, Phase, int]] = Counter()
        self._retries = 0
        self._continuations = 0
        journal.on_finish = self._finished

    def _finished(self, record: RequestRecord) -> None:
        self._requests[record.path, record.life.phase, record.status] += 1
        self._retries += max(0, record.attempts - 1)
        self._continuations += record.continuations
        for phase, seconds in record.life.history:
            self._phases[phase].observe(seconds)
        self._total.observe(record.life.since - record.life.began)
        if record.first_byte_s is not None:
            self._first_byte.observe(record.first_byte_s)

    def render(self) -> str:
        """All metrics."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Finished requests.")
        for (path, phase, status), count in sorted(self._requests.items(), key=str):
            yield f'rd2h_proxy_requests_total{{path="{path}",outcome="{phase.value}",status="{status}"}} {count}'
        yield from _single("retries_total", "counter", "Further attempts on other engines.", self._retries)
        yield from _single(
            "continuations_total", "counter", "Continuations after Decode gave a request back.", self._continuations
        )
        yield from _single("in_flight", "gauge", "Requests not finished.", len(self._journal.in_flight))
        yield from _head("phase_seconds", "histogram", "Time in each phase; rendezvous is the wait for adverts.")
        for phase, histogram in self._phases.items():
            yield from histogram.lines("rd2h_proxy_phase_seconds", f'phase="{phase.value}"')
        yield from _head("first_byte_seconds", "histogram", "Time to the first byte of the answer.")
        yield from self._first_byte.lines("rd2h_proxy_first_byte_seconds", "")
        yield from _head("request_seconds", "histogram", "Whole time of a request.")
        yield from self._total.lines("rd2h_proxy_request_seconds", "")
        yield from self._engine_lines()
        router = self._router
        yield from _single(
            "meta_service_connected", "gauge", "1 when the meta service is there.", int(router.meta.connected)
        )
        yield from _single("background_tasks", "gauge", "Ends of rendezvous being reported.", len(router.background))
        unreported = router.background.dropped + router.background.failed
        yield from _single("ends_unreported_total", "counter", "Ends that the meta service was not told.", unreported)

    def _engine_lines(self) -> Iterator[str]:
        pools = (self._router.prefill, self._router.decode)
        yield from _head("waiting", "gauge", "Requests that wait for an engine with room.")
        for pool in pools:
            yield f'rd2h_proxy_waiting{{role="{pool.role.value}"}} {pool.waiting}'
        yield from _head("engine_in_flight", "gauge", "Requests on an engine.")
        yield from _each(pools, "engine_in_flight", lambda target: target.in_flight)
        yield from _head("engine_work_tokens", "gauge", "Estimated tokens of the requests on an engine.")
        yield from _each(pools, "engine_work_tokens", lambda target: target.work_tokens)
        yield from _head("engine_usable", "gauge", "1 when new requests may go to an engine.")
        now = time.monotonic()
        yield from _each(pools, "engine_usable", lambda target: int(target.unusable_reason(now) is None))
        yield from _head("engine_breaker", "gauge", "Circuit breaker: 0 closed, 1 on trial, 2 open.")
        yield from _each(pools, "engine_breaker", lambda target: _BREAKER_VALUES[target.breaker.state])


def _each(pools: Sequence[EnginePool], name: str, value: Callable[[Target], int]) -> Iterator[str]:
    for pool in pools:
        for target in pool.targets:
            labels = _labels({"role": pool.role.value, "address": target.address})
            yield f"rd2h_proxy_{name}{{{labels}}} {value(target)}"


def _labels(labels: Mapping[str, str]) -> str:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return ",".join(f'{key}="{escape(value)}"' for key, value in labels.items())


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP rd2h_proxy_{name} {text}"
    yield f"# TYPE rd2h_proxy_{name} {kind}"


def _single(name: str, kind: str, text: str, value: int) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"rd2h_proxy_{name} {value}"
