"""Requests by the hundred whose reads overlap, combine, fail with late bytes and are aborted: real processes and bytes.

Blocks get a new owner the moment their request is reported, and must keep what he wrote.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from harness.cache import CacheSpec
from harness.controlled import ReadControl
from harness.pair import DECODE_OPTIONS, Decode, Prefill, Prompts, parts
from harness.plans import Child, Part, Report
from harness.waiting import wait_for
from harness.worker import Worker

SPEC = CacheSpec(layers=6, blocks=160, scale_bytes=16, buffers=3)
LATE_S, HOLD_S = 0.1, 0.25
QUARANTINE_S = 2 * LATE_S
TakeWorker = Callable[[], Worker]


@dataclass
class Storm:
    """One Prefill of two ranks (whose layers share three buffers), one Decode of one rank with a buffer a layer."""

    prefill: Prefill
    decode: Decode
    chance: random.Random
    prompts: Prompts = field(default_factory=lambda: Prompts(SPEC))
    living: dict[str, Child] = field(default_factory=dict)
    owned: list[tuple[float, Child, int]] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def round(self, *, failing: bool) -> None:
        batch = [self.prompts.child(self.chance.randrange(1, 7)) for _ in range(4)]
        self.living |= {child.name: child for child in batch}
        late = [child for child in batch if self.chance.random() < 0.3]
        self.decode.add(*(child for child in batch if child not in late))
        control = ReadControl(jitter_before_s=0.001, jitter_after_s=0.0005)
        if failing:
            control = replace(control, fail_code=5, late_s=LATE_S)
        self.decode.worker.call("control", control)
        doomed = [child.name for child in batch if self.chance.random() < 0.3]
        for chunk in self._chunks(batch):
            self.prefill.worker.begin("publish", chunk)
            if late:
                self.decode.add(*late)
                late = []
            if doomed and self.chance.random() < 0.5:
                time.sleep(self.chance.random() * 0.01)
                self.decode.worker.call("abort", doomed)
            self.settle()
            self.prefill.worker.end()
        wait_for("all reported", self._all_reported, 20)
        self.prefill.wait_settled()
        for child in batch:
            self.prompts.p_main.give(child.p_main)
            self.prompts.p_indexer.give(child.p_indexer)

    def _chunks(self, batch: list[Child]) -> list[list[Part]]:
        cut = self.chance.randrange(1, 6)
        pieces = [parts(child, self.decode.address, *([cut] if cut < child.blocks else [])) for child in batch]
        return [[one[number] for one in pieces if number < len(one)] for number in range(max(map(len, pieces)))]

    def _all_reported(self) -> bool:
        self.settle()
        return not self.living

    def settle(self) -> None:
        """Take reports in; who is reported loses its blocks at once."""
        for report in self.decode.worker.call("take_finished"):
            self._settle(report)
        now = time.monotonic()
        while self.owned and self.owned[0][0] <= now:
            _, child, content = self.owned.pop(0)
            self._check(child, content)
            self.decode.worker.call("clear", child)
            self.prompts.d_main.give(child.d_main)
            self.prompts.d_indexer.give(child.d_indexer)

    def _settle(self, report: Report) -> None:
        assert report.name not in self.seen, f"reported twice: {report}"
        self.seen.add(report.name)
        child = self.living.pop(report.name)
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        if report.outcome == "done":
            assert self.decode.worker.call("missing", child) == []
        content = 0x100000 + child.content
        self.decode.worker.call("own", child.d_main, child.d_indexer, content)
        self.owned.append((time.monotonic() + QUARANTINE_S, child, content))

    def _check(self, child: Child, content: int) -> None:
        for block in child.d_main:
            one = replace(child, d_main=[block], d_indexer=[], content=content, start=block)
            assert self.decode.worker.call("missing", one) == [], child
        for block in child.d_indexer:
            one = replace(child, d_main=[], d_indexer=[block], content=content, start=block)
            assert self.decode.worker.call("missing", one) == [], child


@pytest.mark.parametrize("threads", [1, 4])
def test_a_storm_of_requests(take_worker: TakeWorker, threads: int) -> None:
    prefill = Prefill.start(take_worker(), SPEC, tp_size=2)
    options = replace(DECODE_OPTIONS, hold_s=HOLD_S, read_threads=threads)
    decode = Decode.start(take_worker(), replace(SPEC, buffers=0), trusted=[prefill.generation], options=options)
    storm = Storm(prefill, decode, random.Random(threads))
    end = time.monotonic() + 8.0
    rounds = 0
    while time.monotonic() < end:
        rounds += 1
        storm.round(failing=rounds % 5 == 0)
    wait_for("all blocks checked", lambda: storm.settle() or not storm.owned, 5)
    decode.worker.call("control", ReadControl())
    decode.check()
    decode.check_baseline()
    assert prefill.worker.call("alive")
    assert prefill.worker.call("outstanding") == 0
    assert set(storm.outcomes) == {"done", "failed", "aborted"}
    assert storm.outcomes["done"] > 40
