"""A gate opens for its own acknowledgement only; a write waits for exactly the entries whose blocks it overwrites."""

import itertools
from collections.abc import Set

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Component, GateEntry, Slot, SlotGates, Writes

MAIN, INDEXER = Component.MAIN, Component.INDEXER


def slot(number: int, component: Component = MAIN) -> Slot:
    return Slot(component, number)


NO_BLOCKS: frozenset[int] = frozenset()


def entry(
    endpoint: object, seq: int, layer: int = 0, main: Set[int] = NO_BLOCKS, indexer: Set[int] = NO_BLOCKS
) -> GateEntry:
    slots = (slot(0), slot(0, INDEXER))
    return GateEntry(endpoint, seq, layer, slots, ChunkBlocks(frozenset(main), frozenset(indexer)))


def test_the_gate_stays_shut_until_the_second_endpoint_has_answered() -> None:
    """Case P5: one of two Decodes answers twice."""
    gates = SlotGates()
    first, second = entry("D1", 1, 5, {1}), entry("D2", 2, 5, {1})
    gates.close(first)
    gates.close(second)
    assert gates.acknowledge("D1", 1, 5) is first
    assert gates.acknowledge("D1", 1, 5) is None
    assert gates.acknowledge("D1", 2, 5) is None
    assert gates.blocking([slot(0)], ALL_BLOCKS) == [second]
    assert gates.acknowledge("D2", 2, 5) is second
    assert gates.blocking(None, ALL_BLOCKS) == []
    assert len(gates) == 0


@pytest.mark.parametrize(("endpoint", "seq", "layer"), [("D2", 1, 0), ("D1", 2, 0), ("D1", 0, 0), ("D1", 1, 1)])
def test_a_foreign_acknowledgement_changes_nothing(endpoint: str, seq: int, layer: int) -> None:
    gates = SlotGates()
    gates.close(entry("D1", 1))
    assert gates.acknowledge(endpoint, seq, layer) is None
    assert len(gates) == 1
    assert len(gates.blocking(None, ALL_BLOCKS)) == 1


def test_an_acknowledgement_of_an_earlier_use_of_the_layer_does_not_open_the_later() -> None:
    gates = SlotGates()
    for seq in (1, 2):
        gates.close(entry("D1", seq, layer=7))
    assert gates.acknowledge("D1", 1, 7) is not None
    assert gates.acknowledge("D1", 1, 7) is None
    assert [e.seq for e in gates.blocking([slot(0)], ALL_BLOCKS)] == [2]


def test_main_and_indexer_block_ids_are_different_things() -> None:
    gates = SlotGates()
    gates.close(entry("D1", 1, main={3}, indexer={8}))
    for writes, blocked in (
        (Writes([3], []), True),
        (Writes([8], []), False),
        (Writes([], [8]), True),
        (Writes([], [3]), False),
        (Writes([8, 4], [3, 4]), False),
        (Writes(None, []), True),
        (Writes([], None), True),
        (Writes([], []), False),
        (ALL_BLOCKS, True),
    ):
        assert bool(gates.blocking(None, writes)) is blocked, writes
    assert gates.blocking([slot(0)], Writes([8], [8])) == []
    assert len(gates.blocking([slot(0, INDEXER)], Writes([], [8]))) == 1
    assert gates.blocking([slot(1), slot(1, INDEXER)], ALL_BLOCKS) == []


def test_a_sequence_number_cannot_be_used_twice() -> None:
    gates = SlotGates()
    gates.close(entry("D1", 1))
    with pytest.raises(ValueError, match="sequence 1 is used twice"):
        gates.close(entry("D1", 1))
    gates.close(entry("D2", 1))
    assert gates.outstanding("D1") == gates.outstanding("D2") == 1


def test_giving_up_an_endpoint_leaves_the_others_shut() -> None:
    gates = SlotGates()
    for endpoint, seq in itertools.product(("D1", "D2"), range(3)):
        gates.close(entry(endpoint, seq))
    assert [e.seq for e in gates.give_up_where("D1", [1, 1, 7, 1])] == [1], "a number may be named twice, or be unknown"
    assert sorted(e.seq for e in gates.give_up("D1")) == [0, 2]
    assert gates.give_up("D1") == []
    assert {(e.endpoint, e.seq) for e in gates.blocking(None, ALL_BLOCKS)} == {("D2", 0), ("D2", 1), ("D2", 2)}


ENDPOINTS = ("D1", "D2", ("host", 1))
seqs = st.integers(0, 8)
layers = st.integers(0, 4)
blocks = st.frozensets(st.integers(0, 5), max_size=4)
slots = st.lists(st.builds(Slot, st.sampled_from(Component), st.integers(0, 2)), max_size=3, unique=True)
endpoints = st.sampled_from(ENDPOINTS)
written = st.none() | st.lists(st.integers(0, 5), max_size=4) | st.sets(st.integers(0, 5), max_size=4)


class GatesAgainstAList(RuleBasedStateMachine):
    """The model is the list of what was told and not yet taken back."""

    @initialize()
    def begin(self) -> None:
        self.gates = SlotGates()
        self.model: list[GateEntry] = []
        self.chunks: list[ChunkBlocks] = []

    def _known(self, endpoint: object, seq: int) -> GateEntry | None:
        return next((e for e in self.model if e.endpoint == endpoint and e.seq == seq), None)

    @rule(endpoint=endpoints, seq=seqs, layer=layers, slots=slots, main=blocks, indexer=blocks, share=st.booleans())
    def close(
        self,
        endpoint: object,
        seq: int,
        layer: int,
        slots: list[Slot],
        main: frozenset[int],
        indexer: frozenset[int],
        share: bool,
    ) -> None:
        if not (share and self.chunks):
            self.chunks.append(ChunkBlocks(main, indexer))
        new = GateEntry(endpoint, seq, layer, tuple(slots), self.chunks[-1])
        if self._known(endpoint, seq) is not None:
            with pytest.raises(ValueError, match="used twice"):
                self.gates.close(new)
            return
        self.gates.close(new)
        self.model.append(new)

    @rule(endpoint=endpoints, seq=seqs, layer=layers)
    def acknowledge_anything(self, endpoint: object, seq: int, layer: int) -> None:
        known = self._known(endpoint, seq)
        expected = known if known is not None and known.layer_idx == layer else None
        assert self.gates.acknowledge(endpoint, seq, layer) is expected
        if expected is not None:
            self.model.remove(expected)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def acknowledge_what_is_open(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.model))
        assert self.gates.acknowledge(known.endpoint, known.seq, known.layer_idx) is known
        assert self.gates.acknowledge(known.endpoint, known.seq, known.layer_idx) is None
        self.model.remove(known)

    @rule(endpoint=endpoints)
    def give_up(self, endpoint: object) -> None:
        gone = [e for e in self.model if e.endpoint == endpoint]
        assert self.gates.give_up(endpoint) == gone
        self.model = [e for e in self.model if e.endpoint != endpoint]

    @rule(endpoint=endpoints, which=st.lists(seqs, max_size=4))
    def give_up_some(self, endpoint: object, which: list[int]) -> None:
        gone = self.gates.give_up_where(endpoint, which)
        expected = [e for e in self.model if e.endpoint == endpoint and e.seq in which]
        assert sorted(e.seq for e in gone) == sorted(e.seq for e in expected)
        self.model = [e for e in self.model if e not in expected]

    @rule(wanted=st.none() | slots, main=written, indexer=written)
    def ask(self, wanted: list[Slot] | None, main: list[int] | None, indexer: list[int] | None) -> None:
        found = self.gates.blocking(wanted, Writes(main, indexer))
        expected = []
        for known in self.model:
            for held in known.slots:
                overwritten = main if held.component is MAIN else indexer
                guarded = known.blocks.main if held.component is MAIN else known.blocks.indexer
                if (wanted is None or held in wanted) and (overwritten is None or guarded & set(overwritten)):
                    expected.append(known)
                    break
        assert sorted(found, key=id) == sorted(expected, key=id)

    @invariant()
    def counts(self) -> None:
        assert len(self.gates) == len(self.model)
        for endpoint in ENDPOINTS:
            assert self.gates.outstanding(endpoint) == sum(1 for e in self.model if e.endpoint == endpoint)

    def teardown(self) -> None:
        for endpoint in ENDPOINTS:
            self.gates.give_up(endpoint)
        assert len(self.gates) == 0
        assert self.gates.blocking(None, ALL_BLOCKS) == []
        assert self.gates == SlotGates(), "nothing of the gates stays behind"


TestGates = GatesAgainstAList.TestCase
TestGates.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
