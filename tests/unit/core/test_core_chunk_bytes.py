"""Every byte of every prompt arrives once and in its place, at any two tensor-parallel sizes; no other byte changes."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from core_sim import CANARY, NUM_BLOCKS, DecodeRank, Memory, Prompt, World
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.children import Outcome
from rd2h.layout import TensorLayout

SIZES = [(1, 1), (2, 1), (4, 2), (4, 1), (8, 2), (3, 3), (6, 2), (8, 1), (8, 8)]


def free_blocks(source: random.Random) -> list[int]:
    """All block ids, in stretches as an allocator gives them or scattered."""
    ids = list(range(NUM_BLOCKS))
    if source.random() < 0.5:
        source.shuffle(ids)
    return ids


def make_prompts(source: random.Random, lengths: Sequence[int], cached: Sequence[tuple[int, int]]) -> list[Prompt]:
    """Prompts with block ids of their own in each of the four id spaces; ``cached`` = first (main, indexer) to pull."""
    spaces = [free_blocks(source) for _ in range(4)]
    prompts = []
    for number, (length, (main_start, indexer_start)) in enumerate(zip(lengths, cached, strict=True), start=1):
        taken = [np.array([space.pop() for _ in range(length)], np.int64) for space in spaces]
        inner = sorted(source.sample(range(1, length), min(length - 1, source.randrange(4)))) if length > 1 else []
        prompts.append(
            Prompt(number, length, min(main_start, length), min(indexer_start, length), *taken, cuts=[*inner, length])
        )
    return prompts


def check_component(
    memory: Memory,
    tensors: Sequence[TensorLayout],
    sources: Sequence[TensorLayout],
    source: Memory,
    wanted: dict[int, int],
) -> None:
    """``wanted`` maps local to Prefill block ids: those hold Prefill's bytes, written once; the rest is untouched."""
    for tensor, source_tensor in zip(tensors, sources, strict=True):
        found, writes = memory.blocks(tensor), memory.blocks(tensor, memory.writes)
        expected = np.full_like(found, CANARY)
        expected_writes = np.zeros_like(writes)
        for to, at in wanted.items():
            expected[to] = source.blocks(source_tensor)[at]
            expected_writes[to] = 1
        np.testing.assert_array_equal(writes, expected_writes)
        np.testing.assert_array_equal(found, expected)


def check_rank(world: World, rank: DecodeRank, prompts: Sequence[Prompt]) -> None:
    """All memory of a Decode rank against what the prompts should have brought."""
    source = world.prefill[0].memory
    main = {int(p.local_main[i]): int(p.source_main[i]) for p in prompts for i in range(p.main_start, p.num_blocks)}
    indexer = {
        int(p.local_indexer[i]): int(p.source_indexer[i]) for p in prompts for i in range(p.indexer_start, p.num_blocks)
    }
    for number, theirs in enumerate(source.layers):
        ours_main, ours_indexer = rank.main_memory.layers[number], rank.indexer_memory.layers[number]
        check_component(rank.main_memory, ours_main.main, theirs.main, source, main)
        check_component(rank.indexer_memory, ours_indexer.indexer_tensors, theirs.indexer_tensors, source, indexer)
        # The two memories are separate; the tensors that a rank does not own there stay as they were.
        check_component(rank.indexer_memory, ours_indexer.main, theirs.main, source, {})
        check_component(rank.main_memory, ours_main.indexer_tensors, theirs.indexer_tensors, source, {})


@pytest.mark.parametrize("split_main", [True, False], ids=["pool", "own-cache"])
@pytest.mark.parametrize(("p_tp", "d_tp"), SIZES)
@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    cached=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=3, max_size=3),
)
def test_every_block_arrives_once(
    p_tp: int, d_tp: int, split_main: bool, seed: int, lengths: list[int], cached: list[tuple[int, int]]
) -> None:
    source = random.Random(seed)
    prompts = make_prompts(
        source, lengths, [(min(m, n - 1), min(i, n - 1)) for (m, i), n in zip(cached, lengths, strict=False)]
    )
    world = World(p_tp, d_tp, split_main, source)
    for prompt in prompts:
        world.add(prompt)
    world.publish(prompts)
    world.run()
    for rank in world.decode:
        check_rank(world, rank, prompts)
        assert len(rank.table) == rank.table.reads_in_flight == 0
    assert sorted((rank, report.token, report.outcome) for rank, report in world.finished) == sorted(
        (rank, prompt.token, Outcome.DONE) for rank in range(d_tp) for prompt in prompts
    )
    main_bytes, indexer_bytes = 8 + 7 + 8, 4 + 0 + 3
    copies = 1 if split_main else d_tp
    assert world.bytes_moved == sum(
        copies * main_bytes * (p.num_blocks - p.main_start) + d_tp * indexer_bytes * (p.num_blocks - p.indexer_start)
        for p in prompts
    )


@pytest.mark.parametrize("split_main", [True, False], ids=["pool", "own-cache"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (4, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9, 16])
def test_odd_counts_and_starts(p_tp: int, d_tp: int, split_main: bool, start: int, count: int) -> None:
    source = random.Random(start * 100 + count)
    (prompt,) = make_prompts(source, [start + count], [(start, start)])
    prompt.cuts = [start + count]
    world = World(p_tp, d_tp, split_main, source)
    world.add(prompt)
    world.publish([prompt])
    world.run()
    for rank in world.decode:
        check_rank(world, rank, [prompt])
    assert [report.outcome for _, report in world.finished] == [Outcome.DONE] * d_tp


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.sampled_from(SIZES[:6]),
    split_main=st.booleans(),
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=3),
    at_step=st.integers(0, 40),
)
def test_nothing_is_written_into_blocks_after_their_child_was_reported(
    sizes: tuple[int, int], split_main: bool, seed: int, lengths: list[int], at_step: int
) -> None:
    """Case L2 and L3: one child of a shared message is aborted, its blocks go to others, its siblings complete."""
    source = random.Random(seed)
    prompts = make_prompts(source, lengths, [(0, 0)] * len(lengths))
    gone, *others = prompts
    world = World(*sizes, split_main, source)
    for prompt in prompts:
        world.add(prompt)
    world.publish(prompts)
    step = 0
    while waiting := [rank for rank in world.prefill if rank.messages]:
        if step == at_step:
            before = {rank for rank, report in world.finished if report.token == gone.token}
            world.abort(gone.token)
            aborted = {rank for rank, report in world.finished if report.outcome is Outcome.ABORTED}
            assert before | aborted == set(range(sizes[1])), "reported on every rank, at once"
            for rank in world.decode:
                reuse(rank, gone)
        sender = source.choice(waiting)
        world.deliver(sender, sender.messages.pop(0))
        step += 1
    reached = step > at_step
    for rank in world.decode:
        check_rank(world, rank, others if reached else prompts)
        assert len(rank.table) == 0
    for prompt in others:
        reports = [report.outcome for _, report in world.finished if report.token == prompt.token]
        assert reports == [Outcome.DONE] * sizes[1]
    assert len([report for _, report in world.finished if report.token == gone.token]) == sizes[1]


def reuse(rank: DecodeRank, prompt: Prompt) -> None:
    """The blocks belong to somebody else now: canaries, and a fresh count of writes."""
    for memory, ids in ((rank.main_memory, prompt.local_main), (rank.indexer_memory, prompt.local_indexer)):
        for layer in memory.layers:
            for tensor in layer.tensors:
                memory.blocks(tensor)[ids] = CANARY
                memory.blocks(tensor, memory.writes)[ids] = 0


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.sampled_from(SIZES[:6]),
    split_main=st.booleans(),
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    lost=st.integers(0, 10_000),
    how=st.sampled_from(["lost", "engine error"]),
)
def test_a_message_that_is_lost_or_fails_never_ends_done(
    sizes: tuple[int, int], split_main: bool, seed: int, lengths: list[int], lost: int, how: str
) -> None:
    """Case L7: any one message of any contributor, chunk and layer; the Decode rank concerned reports a failure."""
    source = random.Random(seed)
    prompts = make_prompts(source, lengths, [(0, 0)] * len(lengths))
    world = World(*sizes, split_main, source)
    for prompt in prompts:
        world.add(prompt)
    world.publish(prompts)
    victim = world.prefill[lost % len(world.prefill)]
    number = lost // len(world.prefill) % len(victim.messages)
    concerned = {p.token for p in prompts if number < len(p.cuts) * 3}
    if how == "lost":
        del victim.messages[number]
        world.run()
    else:
        for _ in range(number):
            world.deliver(victim, victim.messages.pop(0))
        world.deliver(victim, victim.messages.pop(0), fail=True)
        world.run()
    d_rank = world.mapping.decode_rank(victim.p_rank)
    for rank in world.decode:
        rank.table.expire(1000.0)
    world.collect()
    for rank, report in world.finished:
        hit = rank == d_rank and report.token in concerned
        assert report.outcome is (Outcome.FAILED if hit else Outcome.DONE), report
    assert len(world.finished) == sizes[1] * len(prompts)
    assert all(len(rank.table) == 0 for rank in world.decode)
