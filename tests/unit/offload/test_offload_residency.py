"""The residency table: agreement with the obvious one, and the truth of every slot, over random lives of requests."""

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from residency_world import POSITIONS, World, wander

from rd2h.errors import ConfigError, StateError
from rd2h.offload.kernel import load_kernel
from rd2h.offload.residency import Geometry, Question, ResidencyTable, Workspace, request_key

SEEDS = st.integers(0, 2**32 - 1)
WALKS, STEPS = 50, 400


class Lives(RuleBasedStateMachine):
    """Small steps that Hypothesis can shrink."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @precondition(lambda self: self.world.can_join)
    @rule(computed=st.integers(0, POSITIONS - 4), seed=SEEDS)
    def join(self, computed, seed):
        self.world.join(computed, random.Random(seed))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def leave(self, data):
        self.world.leave(data.draw(st.sampled_from(self.world.requests)))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), seed=SEEDS)
    def resume(self, data, seed):
        self.world.resume(data.draw(st.sampled_from(self.world.requests)), random.Random(seed))

    @precondition(lambda self: len(self.world.requests) > 1)
    @rule(seed=SEEDS)
    def reorder(self, seed):
        random.Random(seed).shuffle(self.world.requests)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), width=st.integers(1, 3), accepted=st.integers(1, 3), look_up=st.booleans(), seed=SEEDS)
    def step(self, data, width, accepted, look_up, seed):
        running = data.draw(st.lists(st.sampled_from(self.world.requests), min_size=1, max_size=3, unique_by=id))
        self.world.step(running, width, accepted, random.Random(seed), look_up)

    @precondition(lambda self: self.world.requests)
    @rule(seed=SEEDS)
    def draft(self, seed):
        self.world.look_up([(request, request.computed) for request in self.world.requests], random.Random(seed))

    @rule()
    def fail(self):
        for table in (self.world.reference, *self.world.tables):
            table.clear()

    @invariant()
    def rows_hold_each_slot_once(self):
        for table in self.world.tables:
            for row in range(self.world.geometry.rows):
                slots = sorted(slot for _, slot in table.residents(row))
                assert slots == list(range(self.world.geometry.capacity))


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


WALKED = []


@settings(max_examples=WALKS, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(seed=SEEDS)
def test_agrees_with_the_obvious_table(seed):
    WALKED.append(wander(seed, STEPS))


def test_the_walks_were_long_and_saw_everything():
    assert sum(world.steps for world in WALKED) >= 20_000
    assert sum(world.hits for world in WALKED) > 10_000
    assert sum(world.evictions for world in WALKED) > 200
    assert sum(world.duplicates for world in WALKED) > 1_000
    assert sum(world.rewrites for world in WALKED) > 1_000


# --- single rules ---


@pytest.fixture(params=["numpy", "kernel"])
def kernel(request):
    found = load_kernel() if request.param == "kernel" else None
    assert (found is not None) == (request.param == "kernel")
    return found


GEOMETRY = Geometry(rows=2, capacity=8, topk=4, block_size=4, num_blocks=10)


def ask(table, topk, key=7, prefix=100, blocks=(9, 8, 7, 6), row=0):
    """Plan for one row; the other row is padding."""
    rows = np.full((2, 4), -1, np.int64)
    rows[row, : len(topk)] = topk
    keys, prefixes = np.zeros(2, np.uint64), np.zeros(2, np.int64)
    keys[row], prefixes[row] = key, prefix
    plan = table.plan(Question(rows, keys, prefixes, np.array([blocks, blocks], np.int32)))
    return plan.slots[row].tolist(), plan.sources.tolist(), plan.targets.tolist(), plan


def test_misses_take_free_slots_then_the_least_recently_used(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    assert ask(table, [0, 1, 2, 3])[0] == [0, 1, 2, 3]
    assert ask(table, [4, 5, 6, 7])[0] == [4, 5, 6, 7]
    assert ask(table, [0, 1])[3].misses == 0
    slots, sources, targets, plan = ask(table, [8, 9, 4])
    assert slots == [2, 3, 4, -1]
    assert sources == [7 * 4 + 0, 7 * 4 + 1]
    assert targets == [2, 3]
    assert (plan.hits, plan.misses, plan.evictions) == (1, 2, 2)


def test_a_slot_freed_by_a_rewrite_goes_before_any_resident(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [0, 1, 2, 3], prefix=8)
    ask(table, [4, 5, 6, 7], prefix=8)
    slots, _, _, plan = ask(table, [8], prefix=7)
    assert slots[0] == 7
    assert plan.evictions == 0


def test_other_request_on_a_row_finds_nothing(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [0, 1, 2, 3])
    assert ask(table, [0, 1, 2, 3], key=8)[3].misses == 4
    assert ask(table, [0, 1, 2, 3], key=7)[3].misses == 4
    assert ask(table, [0, 1, 2, 3], key=7 + 2**63)[3].misses == 4


def test_what_was_fetched_from_above_the_stable_prefix_serves_one_step(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [3, 4, 5, 6], prefix=5)
    # By now 5 and 6 are final, but they may have been rewritten after they were fetched.
    assert ask(table, [3, 4, 5, 6], prefix=9)[1] == [8 * 4 + 1, 8 * 4 + 2]
    assert ask(table, [3, 4, 5, 6], prefix=9)[3].misses == 0


def test_a_prefix_that_falls_drops_what_lies_above(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [3, 4, 5, 6], prefix=9)
    assert ask(table, [3, 4, 5, 6], prefix=5)[1] == [8 * 4 + 1, 8 * 4 + 2]
    assert ask(table, [3, 4, 5, 6], prefix=9)[1] == [8 * 4 + 1, 8 * 4 + 2]
    assert ask(table, [3, 4, 5, 6], prefix=9)[3].misses == 0


def test_padding_changes_nothing(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [0, 1, 2, 3])
    before = table.residents(0)
    slots, sources, _, _ = ask(table, [5, 6], key=0, blocks=(-9, -9, -9, -9))
    assert slots == [-1] * 4
    assert sources == []
    assert table.residents(0) == before
    assert ask(table, [0, 1, 2, 3])[3].misses == 0


def test_duplicates_share_a_slot_and_count_as_hits(kernel):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    slots, _, _, plan = ask(table, [5, 5, 2, 5])
    assert slots == [0, 0, 1, 0]
    assert (plan.misses, plan.hits) == (2, 2)


@pytest.mark.parametrize(
    ("topk", "blocks", "message"),
    [
        ([0, 16], (9, 8, 7, 6), "row 0: position 16 is beyond its 16 positions"),
        ([0, 2**40], (9, 8, 7, 6), f"row 0: position {2**40} is beyond its 16 positions"),
        ([0, 4], (9, 10, 7, 6), "row 0: pool block 10 is not one of the pool's 10"),
        ([0, 4], (9, -1, 7, 6), "row 0: pool block -1 is not one of the pool's 10"),
    ],
)
def test_out_of_range_is_refused_and_leaves_nothing_resident(kernel, topk, blocks, message):
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [0, 1, 2, 3])
    with pytest.raises(StateError) as raised:
        ask(table, topk, blocks=blocks)
    assert str(raised.value) == message
    assert ask(table, [0, 1, 2, 3])[3].misses == 4
    assert ask(table, [0, 1, 2, 3])[3].misses == 0


def test_pool_rows_beyond_32_bits(kernel):
    geometry = Geometry(rows=1, capacity=8, topk=2, block_size=4, num_blocks=2**31 - 1)
    table = ResidencyTable(geometry, kernel=kernel)
    tables = np.array([[2**31 - 2]], np.int32)
    plan = table.plan(Question(np.array([[3, 0]], np.int64), np.ones(1, np.uint64), np.zeros(1, np.int64), tables))
    assert plan.sources.tolist() == [(2**31 - 2) * 4 + 3, (2**31 - 2) * 4]


def test_residents_beyond_a_shorter_block_table_stay(kernel):
    """Tables as long as the step needs: a row's residents may lie beyond what this step's table covers."""
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    ask(table, [38, 1], prefix=40, blocks=range(10))
    rows = np.array([[2, -1, -1, -1], [3, 0, -1, -1]])
    plan = table.plan(Question(rows, np.array([7, 8], np.uint64), np.array([40, 4]), np.array([[5], [6]], np.int32)))
    assert plan.slots.tolist() == [[2, -1, -1, -1], [0, 1, -1, -1]]
    assert (plan.sources.tolist(), plan.targets.tolist()) == ([22, 27, 24], [2, 8, 9])
    assert ask(table, [38, 1, 2], prefix=40, blocks=range(10))[0] == [0, 1, 2, -1]


@pytest.mark.parametrize("seed", range(40))
def test_both_forms_agree_on_any_tables_prefixes_and_number_of_rows(seed):
    compiled, rng = load_kernel(), np.random.default_rng(seed)
    assert compiled is not None
    tables = [ResidencyTable(GEOMETRY), ResidencyTable(GEOMETRY, kernel=compiled)]
    for _ in range(50):
        rows, blocks = rng.integers(0, GEOMETRY.rows + 1), rng.integers(0, 9)
        topk = rng.integers(-3, blocks * 4 + 1, (rows, GEOMETRY.topk)) if blocks else np.full((rows, GEOMETRY.topk), -1)
        question = Question(
            np.asfortranarray(topk),
            rng.integers(0, 3, rows).astype(np.uint64),
            rng.integers(-2, 36, rows),
            np.asfortranarray(rng.integers(0, GEOMETRY.num_blocks, (rows, blocks)).astype(np.int32)),
        )
        answers = []
        for table in tables:
            try:
                plan = table.plan(question)
            except StateError:
                answers.append(None)
                continue
            lists = [values.tolist() for values in (plan.slots, plan.sources, plan.targets)]
            answers.append((*lists, plan.hits, plan.evictions))
        assert answers[0] == answers[1]


def test_many_rows_are_planned_in_turns(monkeypatch):
    monkeypatch.setattr("rd2h.offload.residency.MAX_WORKSPACE_ENTRIES", 40)
    for seed in range(5):
        wander(seed, 50)


@pytest.mark.parametrize(
    "wrong",
    [
        {"topk": np.zeros((2, 3), np.int64)},
        {"stable_prefix": np.zeros(1, np.int64)},
        {"block_tables": np.zeros((1, 4), np.int32)},
        {"block_tables": np.zeros(2, np.int32)},
    ],
)
def test_shapes_are_checked(kernel, wrong):
    right = {
        "topk": np.zeros((2, 4), np.int64),
        "keys": np.ones(2, np.uint64),
        "stable_prefix": np.zeros(2, np.int64),
        "block_tables": np.zeros((2, 4), np.int32),
    }
    table = ResidencyTable(GEOMETRY, kernel=kernel)
    table.plan(Question(**right))
    with pytest.raises(StateError, match="shapes"):
        table.plan(Question(**{**right, **wrong}))


def test_more_rows_than_the_buffer_are_refused(kernel):
    table = ResidencyTable(GEOMETRY, Workspace(GEOMETRY), kernel)
    arrays = np.zeros((3, 4), np.int64), np.ones(3, np.uint64), np.zeros(3, np.int64), np.zeros((3, 4), np.int32)
    with pytest.raises(StateError, match="3 rows asked, the hot buffer has 2"):
        table.plan(Question(*arrays))


@pytest.mark.parametrize(("capacity", "topk", "block"), [(8, 9, 4), (10, 4, 4), (8, 0, 4), (8, 4, 0)])
def test_geometry_is_checked(capacity, topk, block):
    with pytest.raises(ConfigError):
        Geometry(1, capacity, topk, block, 1)


def test_request_keys():
    keys = {request_key(f"request-{number}", life) for number in range(1000) for life in range(3)}
    assert len(keys) == 3000
    assert 0 not in keys
    assert max(keys) > 2**63
    assert request_key("a", 1) == request_key("a", 1)
