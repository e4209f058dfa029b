"""ChildTable under any order of events, against a model that remembers only what was said about each child."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rd2h.children import ChildSpec, ChildState, ChildTable, Outcome
from rd2h.errors import RequestError, StateError
from rd2h.ledger import BlockRange

IDLE_S = 8
picks = st.integers(0, 400)


@dataclass(eq=False)
class Story:
    """What happened to one child, as told by the calls."""

    spec: ChildSpec
    last_progress_s: int
    ended: Outcome | None = None
    hold_until_s: int = 0
    ratio: int | None = None
    sources: dict[int, str] = field(default_factory=dict)
    delivered: dict[int, tuple[set[int], set[int]]] = field(default_factory=dict)
    said_done: set[int] = field(default_factory=set)

    def covered(self, member: int) -> bool:
        """Whether ``member`` delivered every block of both components."""
        main, indexer = self.delivered.get(member, (set(), set()))
        wanted = self.spec.main_range, self.spec.indexer_range
        return all(set(range(w.start, w.stop)) <= have for w, have in zip(wanted, (main, indexer), strict=True))

    def all_covered(self) -> bool:
        return self.ratio is not None and all(self.covered(member) for member in range(self.ratio))


class Table(RuleBasedStateMachine):
    """Times are whole seconds. A read delivers to one contributor of every child it touches, when it returns."""

    @initialize()
    def begin(self) -> None:
        self.table = ChildTable(float(IDLE_S))
        self.now_s = 0
        self.living: dict[bytes, Story] = {}
        self.reported: dict[bytes, Outcome] = {}
        self.refused: set[bytes] = set()
        self.reads: dict[int, frozenset[bytes]] = {}
        self.external: dict[str, bytes] = {}
        self.next_token = 0

    def _pick(self, pick: int) -> bytes:
        """Mostly a living child; now and then one that has ended or never was."""
        if pick % 4 and self.living:
            return sorted(self.living)[pick // 4 % len(self.living)]
        return (pick // 4 % (self.next_token + 2)).to_bytes(16, "big")

    def _end(self, token: bytes, outcome: Outcome, hold_s: int = 0) -> None:
        story = self.living.get(token)
        if story is None:
            return
        if story.ended is None or (story.ended is Outcome.DONE and outcome is Outcome.FAILED):
            story.ended = outcome
        if outcome is Outcome.FAILED:
            story.hold_until_s = max(story.hold_until_s, self.now_s + hold_s)

    def _collect(self) -> None:
        """Take the reports and hold each against its story."""
        for report in self.table.take_finished():
            story = self.living.pop(report.token)
            assert report.token not in self.reported, "reported twice"
            assert report.request_id == story.spec.request_id
            assert not any(report.token in touched for touched in self.reads.values()), "a read is still in flight"
            assert self.now_s >= story.hold_until_s, "bytes may still land"
            assert report.outcome is story.ended
            assert bool(report.reason) is (report.outcome is not Outcome.DONE)
            if report.outcome is Outcome.DONE:
                assert story.all_covered()
                assert story.said_done == set(range(story.ratio or 0))
            self.reported[report.token] = report.outcome
            if self.external.get(story.spec.external_id) == report.token:
                del self.external[story.spec.external_id]

    def _must_be_settled(self) -> None:
        """After a settling call nobody who could be reported is kept waiting."""
        for token, story in self.living.items():
            in_flight = any(token in touched for touched in self.reads.values())
            assert story.ended is None or in_flight or self.now_s < story.hold_until_s, story

    # --- events ---

    @rule(
        main=st.integers(0, 4),
        indexer=st.integers(0, 3),
        start=st.integers(0, 2),
        external=st.sampled_from("abc"),
        refuse_first=st.integers(0, 9),
    )
    def add(self, main: int, indexer: int, start: int, external: str, refuse_first: int) -> None:
        self.next_token += 1
        token = self.next_token.to_bytes(16, "big")
        spec = ChildSpec(token, f"r{self.next_token}", external, np.arange(main), start, np.arange(indexer), start + 1)
        if refuse_first == 0:
            self.table.refuse(token, "refused")
            self.refused.add(token)
        if token in self.refused:
            self.table.add(spec, self.now_s)
            (report,) = self.table.take_finished()
            assert (report.token, report.outcome) == (token, Outcome.FAILED)
            assert report.reason.startswith("refused")
            self.reported[token] = Outcome.FAILED
            return
        self.table.add(spec, self.now_s)
        self.living[token] = Story(spec, self.now_s)
        self.external.setdefault(external, token)

    @rule(pick=picks)
    def add_again(self, pick: int) -> None:
        token = self._pick(pick)
        spec = ChildSpec(token, "again", "again", np.arange(1), 0, np.arange(1), 0)
        if token in self.living:
            with pytest.raises(StateError):
                self.table.add(spec, self.now_s)
            return
        if token not in self.reported:
            return
        self.table.add(spec, self.now_s)
        (report,) = self.table.take_finished()
        assert (report.token, report.request_id, report.outcome) == (token, "again", Outcome.FAILED)

    @rule(pick=picks, member=st.integers(0, 1), ratio=st.sampled_from([1, 2, 2, 2]), source=st.sampled_from("PQ"))
    def admit(self, pick: int, member: int, ratio: int, source: str) -> None:
        token = self._pick(pick)
        child = self.table.get(token)
        if child is None or child.state is not ChildState.PULLING or member >= ratio:
            return
        story = self.living[token]
        connection = f"{source}{member}"
        fits = story.ratio in (None, ratio) and story.sources.get(member, connection) == connection
        # Connections are compared by identity; these texts are made once each.
        connection = CONNECTIONS[connection]
        if fits:
            child.admit(connection, member, ratio, True)
            story.ratio = ratio
            story.sources[member] = connection
        else:
            with pytest.raises(RequestError):
                child.admit(connection, member, ratio, True)

    @rule(some=st.lists(picks, max_size=3))
    def begin_read(self, some: list[int]) -> None:
        tokens = {self._pick(pick) for pick in some}
        if any(t not in self.living or self.living[t].ended is not None for t in tokens):
            with pytest.raises(StateError):
                self.table.begin_read(tokens)
            return
        self.reads[self.table.begin_read(tokens)] = frozenset(tokens)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), engine_error=st.sampled_from([None, None, None, 0, 3]))
    def end_read(self, data: st.DataObject, engine_error: int | None) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.reads)))
        touched = sorted(self.reads[read_id])
        for token in touched:
            if engine_error is not None:
                self.table.fail(token, "engine error", self.now_s, engine_error)
                self._end(token, Outcome.FAILED, engine_error)
            else:
                self._deliver(data, token)
        self._collect()
        del self.reads[read_id]
        self.table.end_read(read_id, self.now_s)
        for token in touched:
            if token in self.living:
                self.living[token].last_progress_s = self.now_s
        self._collect()
        self._must_be_settled()

    def _deliver(self, data: st.DataObject, token: bytes) -> None:
        child, story = self.table.get(token), self.living.get(token)
        if child is None or story is None or child.ledger is None or not story.sources:
            return
        member = data.draw(st.sampled_from(sorted(story.sources)))
        parts = []
        for have, wanted in zip(
            story.delivered.setdefault(member, (set(), set())),
            (story.spec.main_range, story.spec.indexer_range),
            strict=True,
        ):
            frontier = max(have, default=wanted.start - 1) + 1
            begin = data.draw(st.sampled_from([frontier, frontier, wanted.start, frontier + 1]))
            parts.append((have, BlockRange(begin, max(begin, wanted.stop - data.draw(st.integers(0, 1)))), frontier))
        lost = False
        for have, part, frontier in parts:
            if part.start > frontier and part.start < part.stop:
                lost = True
                break
            have |= set(range(part.start, part.stop))
        if not lost:
            child.ledger.advance(member, parts[0][1], parts[1][1])
            return
        with pytest.raises(RequestError):
            child.ledger.advance(member, parts[0][1], parts[1][1])
        self.table.fail(token, "hole", self.now_s)
        self._end(token, Outcome.FAILED)

    @rule(pick=picks, member=st.integers(0, 2))
    def contributor_done(self, pick: int, member: int) -> None:
        self._say_done(self._pick(pick), member)

    def _say_done(self, token: bytes, member: int) -> None:
        self.table.contributor_done(token, member, self.now_s)
        story = self.living.get(token)
        if story is not None and story.ended is None:
            if story.ratio is None or member >= story.ratio or not story.covered(member):
                self._end(token, Outcome.FAILED)
            else:
                story.said_done.add(member)
                if story.said_done == set(range(story.ratio)):
                    self._end(token, Outcome.DONE)
        self._collect()

    @precondition(lambda self: any(s.sources for s in self.living.values()))
    @rule(data=st.data())
    def finish_properly(self, data: st.DataObject) -> None:
        """What a healthy Prefill does; random events alone seldom get that far."""
        token = data.draw(st.sampled_from(sorted(t for t, s in self.living.items() if s.sources)))
        story, child = self.living[token], self.table.get(token)
        assert child is not None
        if story.ended is not None or story.ratio is None:
            return
        for member in range(story.ratio):
            source = story.sources.setdefault(member, CONNECTIONS[f"P{member}"])
            ledger = child.admit(source, member, story.ratio, True)
            ledger.advance(member, story.spec.main_range, story.spec.indexer_range)
            have = story.delivered.setdefault(member, (set(), set()))
            for blocks, wanted in zip(have, (story.spec.main_range, story.spec.indexer_range), strict=True):
                blocks |= set(range(wanted.start, wanted.stop))
            self._say_done(token, member)

    @rule(pick=picks, hold_s=st.sampled_from([0, 0, 2, 5]))
    def fail(self, pick: int, hold_s: int) -> None:
        token = self._pick(pick)
        self.table.fail(token, "failed", self.now_s, hold_s)
        self._end(token, Outcome.FAILED, hold_s)
        self._collect()

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        token = self._pick(pick)
        story = self.living.get(token)
        known = self.table.abort(f"r{int.from_bytes(token, 'big')}", self.now_s)
        assert known == (token if story is not None else None)
        self._end(token, Outcome.ABORTED)
        self._collect()

    @rule(pick=picks)
    def refuse(self, pick: int) -> None:
        token = self._pick(pick)
        self.table.refuse(token, "refused early or late")
        if token not in self.living and token not in self.reported:
            self.refused.add(token)
        assert (self.table.why_gone(token) is None) is (token in self.living)

    @rule(source=st.sampled_from(["P0", "P1", "Q0", "Q1"]))
    def fail_source(self, source: str) -> None:
        hit = {t for t, s in self.living.items() if s.ended is None and CONNECTIONS[source] in s.sources.values()}
        assert set(self.table.fail_source(CONNECTIONS[source], "lost", self.now_s)) == hit
        for token in hit:
            self._end(token, Outcome.FAILED)
        self._collect()

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        late = {t for t, s in self.living.items() if s.ended is None and self.now_s >= s.last_progress_s + IDLE_S}
        assert set(self.table.expire(self.now_s)) == late
        for token in late:
            self._end(token, Outcome.FAILED)
        self._collect()
        self._must_be_settled()

    # --- always ---

    @invariant()
    def agrees(self) -> None:
        assert self.table.take_finished() == []
        assert len(self.table) == len(self.living)
        assert self.table.reads_in_flight == len(self.reads)
        for token, story in self.living.items():
            child = self.table.get(token)
            assert child is not None
            assert (child.state is ChildState.FENCED) is (story.ended is not None)
            assert self.table.token_of_request(story.spec.request_id) == token
            assert self.table.why_gone(token) is None
        for token in self.reported:
            assert self.table.get(token) is None
            assert self.table.why_gone(token)
        for name in "abc":
            assert self.table.token_of_external(name) == self.external.get(name)

    def teardown(self) -> None:
        for read_id in sorted(self.reads):
            del self.reads[read_id]
            self.table.end_read(read_id, self.now_s)
            self._collect()
        self.now_s += 1000
        for token, story in self.living.items():
            if story.ended is None:
                self._end(token, Outcome.FAILED)
        self.table.expire(self.now_s)
        self._collect()
        assert not self.living
        assert len(self.table) == 0
        for state in (self.table._children, self.table._tokens, self.table._external, self.table._fenced):
            assert not state
        assert not self.table._reads


CONNECTIONS = {f"{source}{member}": f"{source}{member}" for source in "PQ" for member in range(2)}
TestTable = Table.TestCase
TestTable.settings = settings(deadline=None, max_examples=150, stateful_step_count=50)
