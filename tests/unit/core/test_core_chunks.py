"""A chunk: who is in it, who is refused, and when its blocks count as delivered."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rd2h.children import ChildSpec, ChildTable, Outcome
from rd2h.decode.chunks import NO_TOKEN, Chunk, Shares
from rd2h.errors import StateError
from rd2h.wire import ReadRequest

LAYERS = 3
ALONE = Shares(d_rank=0, d_tp=1, split_main=False, member=0, ratio=1)
CONNECTION, OTHER = "connection", "other connection"


def token(number: int) -> bytes:
    return number.to_bytes(16, "big")


def spec(number: int, blocks: int = 4, start: int = 0, external: str = "") -> ChildSpec:
    ids = np.arange(100 * number, 100 * number + blocks, dtype=np.int64)
    return ChildSpec(token(number), f"r{number}", external or f"x{number}", ids, start, ids + 50, start)


def request(
    number: int, start: int = 0, count: int = 4, name: str = "", indexer_count: int | None = None
) -> ReadRequest:
    main = np.arange(start, start + count, dtype=np.int64)
    indexer = np.arange(start, start + (count if indexer_count is None else indexer_count), dtype=np.int64)
    return ReadRequest(name or f"r{number}", main, indexer, start, start, token(number))


def chunk_of(
    *requests: ReadRequest, source: object = CONNECTION, shares: Shares = ALONE, indexer: bool = True
) -> Chunk:
    return Chunk((b"", 0, 1), requests, shares, source, indexer, (1 << LAYERS) - 1)


def by_token(request: ReadRequest) -> bytes | None:
    return request.token


def by_name(table: ChildTable) -> Callable[[ReadRequest], bytes | None]:
    """As for a legacy Prefill."""
    return lambda request: table.token_of_external(request.request_id)


def table_with(*specs: ChildSpec) -> ChildTable:
    table = ChildTable(100.0)
    for each in specs:
        table.add(each, 0.0)
    return table


def read_layer(
    chunk: Chunk, table: ChildTable, layer: int, resolve: Callable[[ReadRequest], bytes | None] = by_token
) -> None:
    """One layer as the reading thread handles it."""
    chunk.resolve(table, resolve)
    read = table.begin_read(chunk.tokens)
    chunk.started = True
    for hit, hole in chunk.layer_read(layer):
        table.fail(hit, hole, 0.0)
    table.end_read(read, 0.0)


def local_blocks(chunk: Chunk) -> list[int]:
    """Decode's main blocks that the plan writes."""
    assert chunk.plan is not None
    runs = chunk.plan.main
    return [int(b) + i for b, n in zip(runs.local, runs.count, strict=True) for i in range(int(n))]


def reasons(chunk: Chunk) -> dict[bytes, str]:
    return {refusal.token: refusal.reason for refusal in chunk.refused}


def results(table: ChildTable) -> dict[bytes, Outcome]:
    return {report.token: report.outcome for report in table.take_finished()}


# --- who is in it ---


def test_the_bad_are_refused_one_by_one_and_the_good_are_read() -> None:
    table = table_with(*(spec(number) for number in (1, 2, 3, 5, 6)), spec(7, start=2))
    table.abort("r2", 0.0)
    table.get(token(3)).admit(OTHER, 0, 1, True)  # type: ignore[union-attr]
    table.begin_read([token(5)])
    table.fail(token(5), "read failed before", 0.0)
    table.refuse(token(8), "came too late")
    chunk = chunk_of(*(request(number) for number in (1, 2, 3, 4, 5)), request(6, start=1), request(7), request(8))
    chunk.resolve(table, by_token)
    assert [piece.token for piece in chunk.pieces] == [token(1)]
    assert chunk.tokens == {token(1)}
    assert local_blocks(chunk) == [100, 101, 102, 103]
    assert reasons(chunk) == {
        token(2): "aborted",
        token(3): "contributor 0 already comes from another Prefill connection",
        token(4): "no such request is waiting here",
        token(5): "read failed before",
        token(6): "main blocks 1..5 lie outside destination 0..4",
        token(7): "main blocks 0..4 lie outside destination 2..6",
        token(8): "came too late",
    }
    assert chunk.unknown == (token(4),), "only this one may still come"


def test_an_indexer_range_outside_the_destination_is_refused() -> None:
    table = table_with(spec(1))
    chunk = chunk_of(request(1, count=3, indexer_count=5))
    chunk.resolve(table, by_token)
    assert reasons(chunk) == {token(1): "indexer blocks 0..5 lie outside destination 0..4"}
    dense = chunk_of(request(1, count=3, indexer_count=5), indexer=False)
    dense.resolve(table, by_token)
    assert not dense.refused
    assert dense.plan is not None
    assert dense.plan.indexer.blocks == 0, "a model without indexer ignores the ids that a legacy Prefill repeats"


def test_an_empty_list_may_name_any_position() -> None:
    table = table_with(spec(1, start=5))
    for start in (0, 5, 2_000_000_000):
        chunk = chunk_of(request(1, start=start, count=0))
        chunk.resolve(table, by_token)
        assert not chunk.refused
        assert local_blocks(chunk) == []


def test_a_request_without_a_token_is_refused_without_one() -> None:
    chunk = chunk_of(request(1))
    chunk.resolve(table_with(), lambda _: None)
    assert reasons(chunk) == {NO_TOKEN: "no such request is waiting here"}
    assert chunk.unknown == (None,)


def test_before_the_first_layer_children_may_still_come() -> None:
    table = table_with(spec(1))
    chunk = chunk_of(request(1), request(2))
    chunk.resolve(table, by_token)
    assert chunk.unknown == (token(2),)
    table.add(spec(2), 0.0)
    chunk.resolve(table, by_token)
    assert chunk.tokens == {token(1), token(2)}
    assert not chunk.refused
    assert not chunk.unknown
    assert len(local_blocks(chunk)) == 8


def test_after_the_first_layer_nobody_joins() -> None:
    """A child that joined later would lack the first layers, and yet look complete."""
    table = table_with(spec(1))
    chunk = chunk_of(request(1), request(2))
    read_layer(chunk, table, 0)
    table.add(spec(2), 0.0)
    for layer in (1, 2):
        read_layer(chunk, table, layer)
        assert chunk.tokens == {token(1)}
        assert reasons(chunk)[token(2)] == "no such request is waiting here"
    table.contributor_done(token(1), 0, 0.0)
    table.contributor_done(token(2), 0, 0.0)
    assert results(table) == {token(1): Outcome.DONE, token(2): Outcome.FAILED}


def test_after_the_first_layer_children_may_go() -> None:
    table = table_with(spec(1), spec(2), spec(3))
    chunk = chunk_of(request(1), request(2), request(3))
    read_layer(chunk, table, 0)
    table.abort("r2", 0.0)
    read_layer(chunk, table, 1)
    assert chunk.tokens == {token(1), token(3)}
    assert local_blocks(chunk) == [100, 101, 102, 103, 300, 301, 302, 303]
    assert reasons(chunk) == {token(2): "aborted"}
    with pytest.raises(StateError):
        table.begin_read([token(2)])


def test_a_name_that_passes_to_another_request_does_not_bring_it_in() -> None:
    """A legacy Prefill names children by external id. The id is used again while the old chunk's layers still come:
    neither the blocks of the first (freed) nor those of the second may be written by them."""
    table = table_with(spec(1, external="same"))
    resolve = by_name(table)
    chunk = chunk_of(request(1, name="same"))
    read_layer(chunk, table, 0, resolve)
    table.abort("r1", 0.0)
    table.add(spec(2, external="same"), 0.0)
    assert table.token_of_external("same") == token(2)
    for layer in (1, 2):
        read_layer(chunk, table, layer, resolve)
        assert chunk.pieces == ()
        assert local_blocks(chunk) == []
    table.contributor_done(token(2), 0, 0.0)
    assert results(table) == {token(1): Outcome.ABORTED, token(2): Outcome.FAILED}


def test_only_the_remainder_of_a_cached_prefix_is_pulled() -> None:
    """Case L10: blocks before ``start`` are shared with others and no message can reach them."""
    table = table_with(spec(1, blocks=3, start=2))
    for start, count in ((0, 5), (1, 4), (1, 1), (4, 2)):
        chunk = chunk_of(request(1, start=start, count=count))
        chunk.resolve(table, by_token)
        assert len(chunk.refused) == 1
        assert local_blocks(chunk) == []
    chunk = chunk_of(request(1, start=2, count=3))
    for layer in range(LAYERS):
        read_layer(chunk, table, layer)
    assert local_blocks(chunk) == [100, 101, 102]
    table.contributor_done(token(1), 0, 0.0)
    assert results(table) == {token(1): Outcome.DONE}


def test_nothing_is_resolved_again_while_nothing_changed() -> None:
    table = table_with(spec(1))
    chunk = chunk_of(request(1))
    calls = []

    def counting(request: ReadRequest) -> bytes | None:
        calls.append(request)
        return request.token

    for layer in range(LAYERS):
        read_layer(chunk, table, layer, counting)
    assert len(calls) == 1
    plan = chunk.plan
    table.add(spec(2), 0.0)
    chunk.resolve(table, counting)
    assert chunk.plan is plan, "another child's arrival does not undo the planning"


# --- when it counts ---


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 0, 1, 1, 2, 2, 0), (1, 2, 0, 1, 2)])
def test_all_layers_in_any_order_with_duplicates(order: Iterable[int]) -> None:
    table = table_with(spec(1))
    chunk = chunk_of(request(1))
    for layer in order:
        read_layer(chunk, table, layer)
    table.contributor_done(token(1), 0, 0.0)
    assert results(table) == {token(1): Outcome.DONE}


@pytest.mark.parametrize("layers", [(), (0,), (0, 1), (0, 1, 1, 0, 1), (2, 2, 2), (1, 2)])
def test_a_missing_layer_fails_at_the_end(layers: Iterable[int]) -> None:
    table = table_with(spec(1))
    chunk = chunk_of(request(1))
    for layer in layers:
        read_layer(chunk, table, layer)
    table.contributor_done(token(1), 0, 0.0)
    assert results(table) == {token(1): Outcome.FAILED}


def test_a_missing_layer_of_an_earlier_chunk_is_noticed_at_the_next_chunk() -> None:
    table = table_with(spec(1, blocks=8))
    first, second = chunk_of(request(1, 0, 4)), chunk_of(request(1, 4, 4))
    for layer in (0, 2):
        read_layer(first, table, layer)
    for layer in range(LAYERS):
        read_layer(second, table, layer)
    (report,) = table.take_finished()
    assert report.outcome is Outcome.FAILED
    assert report.reason == "main blocks 0..4 never arrived"


def test_a_refused_request_never_ends_done() -> None:
    """Its blocks were not read in this chunk, whatever the last message says."""
    table = table_with(spec(1, blocks=8), spec(2, blocks=8))
    for chunk in (chunk_of(request(1, 0, 4), request(2, 0, 4)), chunk_of(request(1, 4, 4), request(2, 5, 4))):
        for layer in range(LAYERS):
            read_layer(chunk, table, layer)
    assert [refusal.token for refusal in chunk.refused] == [token(2)]
    for number in (1, 2):
        table.contributor_done(token(number), 0, 0.0)
    assert results(table) == {token(1): Outcome.DONE, token(2): Outcome.FAILED}


def test_a_member_without_blocks_counts_for_completion() -> None:
    """One block, four contributors: three of them have nothing to read and are waited for all the same."""
    table = table_with(spec(1, blocks=1))
    plans = []
    for member in range(4):
        shares = Shares(0, 1, False, member, 4)
        chunk = chunk_of(request(1, 0, 1), source=f"connection {member}", shares=shares)
        for layer in range(LAYERS):
            read_layer(chunk, table, layer)
        assert results(table) == {}
        assert chunk.plan is not None
        plans.append((chunk.plan.main.blocks, chunk.plan.indexer.blocks))
        table.contributor_done(token(1), member, 0.0)
    assert results(table) == {token(1): Outcome.DONE}
    assert [main for main, _ in plans] == [1, 0, 0, 0]
    assert sorted(indexer for _, indexer in plans) == [0, 0, 0, 1]


# --- any order of events ---


class ChunksInOrder(RuleBasedStateMachine):
    """One connection sends chunks of three children, with lost and repeated layers, while children come and go.

    The model remembers, for each child and chunk, on which layers its blocks were really read.
    """

    CHUNKS = 2

    @initialize(late=st.sets(st.sampled_from([1, 2, 3]), max_size=2))
    def begin(self, late: set[int]) -> None:
        self.table = ChildTable(1000.0)
        self.specs = {number: spec(number, blocks=2 * self.CHUNKS) for number in (1, 2, 3)}
        self.absent = set(late)
        for number in {1, 2, 3} - late:
            self.table.add(self.specs[number], 0.0)
        self.chunks = [
            chunk_of(*(request(number, 2 * index, 2) for number in (1, 2, 3))) for index in range(self.CHUNKS)
        ]
        self.index = 0
        self.read: dict[tuple[int, int], set[int]] = {(n, i): set() for n in (1, 2, 3) for i in range(self.CHUNKS)}
        self.members: list[set[bytes]] = [set() for _ in self.chunks]
        self.outcomes: dict[bytes, Outcome] = {}

    @rule(layer=st.integers(0, LAYERS - 1), last_chance=st.booleans())
    def layer(self, layer: int, last_chance: bool) -> None:
        chunk = self.chunks[self.index]
        chunk.resolve(self.table, by_token)
        if chunk.unknown and not chunk.started:
            if not last_chance:
                return
            for unknown in chunk.unknown:
                self.table.refuse(unknown or NO_TOKEN, "too late")
        if chunk.started:
            assert set(chunk.tokens) <= self.members[self.index], "somebody joined"
        self.members[self.index] = set(chunk.tokens)
        named = [int.from_bytes(t, "big") for t in chunk.tokens]
        assert set(local_blocks(chunk)) == {100 * number + 2 * self.index + i for number in named for i in range(2)}, (
            "exactly the blocks of the members are written"
        )
        read_layer(chunk, self.table, layer)
        for number in named:
            self.read[number, self.index].add(layer)
        self._collect()

    @rule()
    def all_layers(self) -> None:
        for layer in range(LAYERS):
            self.layer(layer, True)

    @precondition(lambda self: self.index + 1 < self.CHUNKS)
    @rule()
    def next_chunk(self) -> None:
        self.index += 1

    @precondition(lambda self: self.absent)
    @rule()
    def arrives(self) -> None:
        self.table.add(self.specs[self.absent.pop()], 0.0)
        self._collect()

    @rule(number=st.sampled_from([1, 2, 3]), how=st.sampled_from(["abort", "fail"]))
    def goes(self, number: int, how: str) -> None:
        if how == "abort":
            self.table.abort(f"r{number}", 0.0)
        else:
            self.table.fail(token(number), "failed", 0.0)
        self._collect()

    def _collect(self) -> None:
        for report in self.table.take_finished():
            assert report.token not in self.outcomes
            self.outcomes[report.token] = report.outcome

    @invariant()
    def nobody_is_done_yet(self) -> None:
        assert Outcome.DONE not in self.outcomes.values()

    def teardown(self) -> None:
        for number in (1, 2, 3):
            self.table.contributor_done(token(number), 0, 0.0)
        gone_before = dict(self.outcomes)
        self._collect()
        for number in {1, 2, 3} - self.absent:
            proven = all(self.read[number, index] == set(range(LAYERS)) for index in range(self.CHUNKS))
            if token(number) not in gone_before:
                assert self.outcomes[token(number)] is (Outcome.DONE if proven else Outcome.FAILED)
        assert len(self.table) == 0


TestChunksInOrder = ChunksInOrder.TestCase
TestChunksInOrder.settings = settings(deadline=None, max_examples=200, stateful_step_count=20)
