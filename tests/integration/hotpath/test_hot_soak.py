"""Two Prefills and two Decodes under a stream of requests with aborts and restarts: nothing corrupt, hung or leaked."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from harness.cache import CacheSpec
from harness.pair import BlockPool, Decode, Prefill
from harness.plans import Child, Part, Report
from harness.waiting import wait_for
from harness.worker import Worker

from rd2h.prefill.options import PublisherOptions

SPEC = CacheSpec(layers=4, blocks=192, scale_bytes=16)
BATCH = 16
MAX_PROMPT_BLOCKS = 8
ABORT_SHARE = 0.1
GROWTH_BYTES = 24 << 20
TakeWorker = Callable[[], Worker]


@dataclass
class Seat:
    """A Decode process and who lives in its blocks."""

    decode: Decode
    main: BlockPool = field(default_factory=lambda: BlockPool(SPEC.blocks))
    indexer: BlockPool = field(default_factory=lambda: BlockPool(SPEC.blocks))
    living: dict[str, Child] = field(default_factory=dict)
    ended: dict[str, Report] = field(default_factory=dict)

    def settle(self) -> None:
        """Take reports in: done children must hold their bytes; all give their blocks back as canaries."""
        for report in self.decode.worker.call("take_finished"):
            assert report.name not in self.ended, f"reported twice: {report}"
            self.ended[report.name] = report
            child = self.living.pop(report.name)
            if report.outcome == "done":
                assert self.decode.worker.call("missing", child) == []
            self.decode.worker.call("clear", child)
            self.main.give(child.d_main)
            self.indexer.give(child.d_indexer)


@dataclass
class Soak:
    """The stream of requests."""

    take_worker: TakeWorker
    chance: random.Random
    prefills: list[Prefill] = field(default_factory=list)
    p_blocks: list[tuple[BlockPool, BlockPool]] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    made: int = 0
    done: int = 0
    aborted: int = 0
    failed: int = 0
    excused: set[str] = field(default_factory=set)
    """Children that may fail: one of their two processes was killed."""

    def start(self) -> None:
        """Two of each."""
        for _ in range(2):
            self.prefills.append(self._prefill())
            self.p_blocks.append((BlockPool(SPEC.blocks), BlockPool(SPEC.blocks)))
        for _ in range(2):
            self.seats.append(Seat(Decode.start(self.take_worker(), SPEC)))
        self._trust()

    def _prefill(self) -> Prefill:
        return Prefill.start(self.take_worker(), SPEC, options=PublisherOptions(peer_timeout_s=20.0))

    def _trust(self) -> None:
        for seat in self.seats:
            seat.decode.worker.call("trust", [prefill.generation for prefill in self.prefills])

    def round(self, kill: str = "") -> None:
        """One batch on each Prefill; some aborted before, some between two chunks; ``kill`` "p" or "d" ends one."""
        batches = [self._batch(index) for index in range(len(self.prefills))]
        doomed = [self._abort_some(batch) for batch in batches]
        for prefill, batch in zip(self.prefills, batches, strict=True):
            first = [Part(child, seat.decode.address, 0, _cut(child), False) for child, seat in batch]
            prefill.worker.begin("publish", [part for part in first if part.stop])
        for prefill in self.prefills:
            prefill.worker.end()
        doomed += [self._abort_some(batch) for batch in batches]
        if kill:
            self._kill(kill, batches)
        for prefill, batch in zip(self.prefills, batches, strict=True):
            rest = [Part(child, seat.decode.address, _cut(child), child.blocks, True) for child, seat in batch]
            prefill.worker.begin("publish", rest)
        for prefill in self.prefills:
            prefill.worker.end()
        self._finish(batches, set().union(*doomed))

    def _batch(self, index: int) -> list[tuple[Child, Seat]]:
        main, indexer = self.p_blocks[index]
        batch = []
        for _ in range(BATCH // len(self.prefills)):
            self.made += 1
            seat = self.chance.choice(self.seats)
            blocks = self.chance.randint(1, MAX_PROMPT_BLOCKS)
            child = Child(
                f"cmpl-{self.made}",
                self.made % (1 << 20) + 1,
                main.take(blocks),
                indexer.take(blocks),
                seat.main.take(blocks),
                seat.indexer.take(blocks),
            )
            seat.living[child.name] = child
            seat.decode.add(child)
            batch.append((child, seat))
        return batch

    def _abort_some(self, batch: list[tuple[Child, Seat]]) -> set[str]:
        names = set()
        for child, seat in batch:
            if self.chance.random() < ABORT_SHARE / 2:
                seat.decode.worker.call("abort", [child.name])
                names.add(child.name)
        return names

    def _kill(self, which: str, batches: list[list[tuple[Child, Seat]]]) -> None:
        if which == "p":
            self.prefills[0].worker.kill()
            self.excused |= {child.name for child, _ in batches[0]}
            self.prefills[0] = self._prefill()
            self._trust()
            return
        seat = self.seats[0]
        seat.decode.worker.kill()
        self.excused |= set(seat.living)
        port = seat.decode.address.base_port
        self.seats[0] = Seat(Decode.start(self.take_worker(), SPEC, port=port))
        self._trust()

    def _finish(self, batches: list[list[tuple[Child, Seat]]], doomed: set[str]) -> None:
        living = [(child, seat) for batch in batches for child, seat in batch if seat in self.seats]
        self.excused |= doomed

        def settled() -> bool:
            for seat in self.seats:
                seat.settle()
            return all(child.name in seat.ended for child, seat in living)

        wait_for("every child reported", settled, 60.0)
        for child, seat in living:
            report = seat.ended[child.name]
            self.done += report.outcome == "done"
            self.aborted += report.outcome == "aborted"
            self.failed += report.outcome == "failed"
            assert report.outcome == "done" or child.name in self.excused, report
        for index, batch in enumerate(batches):
            for child, _ in batch:
                self.p_blocks[index][0].give(child.p_main)
                self.p_blocks[index][1].give(child.p_indexer)

    def check_baseline(self) -> None:
        """All blocks are back and canaries; nothing is left anywhere."""
        for seat in self.seats:
            assert not seat.living
            assert len(seat.main) == len(seat.indexer) == SPEC.blocks
            seat.decode.check()
            seat.decode.check_baseline()
        for prefill in self.prefills:
            prefill.wait_settled(60.0)
            assert prefill.worker.call("alive")

    def memory_bytes(self) -> list[int]:
        """Resident memory of all processes."""
        return [p.worker.memory_bytes() for p in self.prefills] + [s.decode.worker.memory_bytes() for s in self.seats]


def _cut(child: Child) -> int:
    return child.blocks // 2


@pytest.mark.parametrize(
    "requests", [pytest.param(320, id="short"), pytest.param(20_000, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(3600)
def test_soak(take_worker: TakeWorker, requests: int) -> None:
    soak = Soak(take_worker, random.Random(requests))
    soak.start()
    rounds = requests // BATCH
    kills = {rounds * (i + 1) // 5: which for i, which in enumerate("pdpd")}
    settled_bytes: list[int] = []
    for number in range(rounds):
        soak.round(kills.get(number, ""))
        if number == rounds - rounds // 10:
            settled_bytes = soak.memory_bytes()
        elif number % 50 == 0:
            soak.check_baseline()
    soak.check_baseline()
    grown = [after - before for after, before in zip(soak.memory_bytes(), settled_bytes, strict=True)]
    assert max(grown) < GROWTH_BYTES, grown
    assert soak.done > 0.6 * soak.made
    assert soak.aborted > 0
    print(f"{soak.made} made, {soak.done} done, {soak.aborted} aborted, {soak.failed} failed, grown {grown}")
