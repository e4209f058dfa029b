"""Descriptors move exactly the bytes that block lists name, in as few pieces as possible."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.layout import LayerLayout, TensorLayout
from rd2h.plan import EMPTY_RUNS, ChunkPlan, Descriptors, LayerPair, Runs, coalesce

Pairs = list[tuple[int, int]]
"""(source block, local block) in order."""


def runs_of(pairs: Pairs) -> Runs:
    source, local = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    return coalesce(source, local)


def obvious(pairs_of: Sequence[Pairs], source: LayerLayout, local: LayerLayout) -> list[Counter[tuple[int, int, int]]]:
    """(local address, peer address, bytes) of every block, for each tensor."""
    blocks = []
    for tensor_from, tensor_to, pairs in zip(source.tensors, local.tensors, pairs_of, strict=True):
        size = tensor_to.block_bytes
        blocks.append(
            Counter((tensor_to.base_addr + to * size, tensor_from.base_addr + at * size, size) for at, to in pairs)
        )
    return blocks


def split_into_blocks(
    found: Descriptors, local: LayerLayout, counts: Sequence[int]
) -> list[Counter[tuple[int, int, int]]]:
    """The descriptors of each tensor, cut into its blocks."""
    assert found.local.dtype == found.peer.dtype == found.lengths.dtype == np.uint64
    assert sum(counts) == len(found.local) == len(found.peer) == len(found.lengths)
    rows = list(zip(found.local.tolist(), found.peer.tolist(), found.lengths.tolist(), strict=True))
    blocks = []
    for tensor, count in zip(local.tensors, counts, strict=True):
        mine, rows = rows[:count], rows[count:]
        size = tensor.block_bytes
        assert all(length % size == 0 and length > 0 for _, _, length in mine)
        for (to, at, length), (next_to, next_at, _) in itertools.pairwise(mine):
            assert (to + length, at + length) != (next_to, next_at), "two neighbours could have been one descriptor"
        blocks.append(
            Counter((to + i * size, at + i * size, size) for to, at, length in mine for i in range(length // size))
        )
    return blocks


ids = st.integers(0, 40) | st.integers(0, 2**31 - 1)
pairs = st.lists(st.tuples(ids, ids), max_size=25)
# Long contiguous stretches on both sides, as a fresh allocator gives them.
stretches = st.lists(st.tuples(ids, ids, st.integers(1, 8)), max_size=5).map(
    lambda rows: [(at + i, to + i) for at, to, count in rows for i in range(count)]
)
block_lists = pairs | stretches
# Bases above 2^63; the largest block and id still end below 2^64.
bases = st.integers(1 << 20, 1 << 40) | st.integers(1 << 63, (1 << 63) + (1 << 62))
sizes = st.sampled_from([1, 7, 64, 16_384, 131_072, 1 << 22])


@st.composite
def layers(draw: st.DrawFn, sizes_of: Sequence[int], mains: int) -> LayerLayout:
    tensors = tuple(TensorLayout(draw(bases), size) for size in sizes_of)
    indexer, scale = (*tensors[mains:], None, None)[:2]
    return LayerLayout("l", tensors[:mains], indexer, scale)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, list[int]]:
    mains, extra = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return mains, draw(st.lists(sizes, min_size=mains + extra, max_size=mains + extra))


@settings(deadline=None, max_examples=200)
@given(st.data(), block_lists, block_lists)
def test_descriptors_against_one_read_per_block(data: st.DataObject, main: Pairs, indexer: Pairs) -> None:
    """One plan serves layers of different shapes, in any order and again."""
    plan = ChunkPlan(runs_of(main), runs_of(indexer))
    for mains, block_bytes in data.draw(st.lists(shapes(), min_size=1, max_size=3)) * 2:
        source, local = (data.draw(layers(block_bytes, mains)) for _ in range(2))
        pairs_of = [main] * mains + [indexer] * (len(block_bytes) - mains)
        found = plan.descriptors(source, local)
        counts = [len((plan.main if i < mains else plan.indexer).count) for i in range(len(block_bytes))]
        assert split_into_blocks(found, local, counts) == obvious(pairs_of, source, local)
        assert (
            found.nbytes
            == sum(size * len(pairs) for size, pairs in zip(block_bytes, pairs_of, strict=True))
            == int(found.lengths.sum())
        )


@settings(deadline=None)
@given(block_lists)
def test_runs_are_the_pairs_in_order_and_as_long_as_possible(pairs: Pairs) -> None:
    runs = runs_of(pairs)
    rows = list(zip(runs.source.tolist(), runs.local.tolist(), runs.count.tolist(), strict=True))
    assert [(at + i, to + i) for at, to, count in rows for i in range(count)] == pairs
    assert runs.blocks == len(pairs)
    for (at, to, count), (next_at, next_to, _) in itertools.pairwise(rows):
        assert (at + count, to + count) != (next_at, next_to)


def test_no_blocks() -> None:
    plan = ChunkPlan(EMPTY_RUNS, EMPTY_RUNS)
    layer = LayerLayout("l", (TensorLayout(0, 64), TensorLayout(64, 8)), TensorLayout(128, 16))
    found = plan.descriptors(layer, layer)
    assert len(found.local) == found.nbytes == 0
    indexer_only = ChunkPlan(EMPTY_RUNS, runs_of([(3, 5)])).descriptors(layer, layer)
    assert (indexer_only.local.tolist(), indexer_only.peer.tolist()) == ([128 + 5 * 16], [128 + 3 * 16])


@pytest.mark.parametrize("base", [2**63, 2**63 + 2**62, 2**64 - 2**31 * 64])
def test_addresses_are_exact_to_the_last_bit(base: int) -> None:
    odd = base + 1 if base + 1 + 2**31 * 64 <= 2**64 else base
    source = LayerLayout("l", (TensorLayout(odd, 64),))
    local = LayerLayout("l", (TensorLayout(odd - 64, 64),))
    found = ChunkPlan(runs_of([(2**31 - 1, 2**31 - 2)]), EMPTY_RUNS).descriptors(source, local)
    assert found.peer.tolist() == [odd + (2**31 - 1) * 64]
    assert found.local.tolist() == [odd - 64 + (2**31 - 2) * 64]


def test_the_layers_of_a_chunk_share_the_work() -> None:
    """After the first layer only base addresses are added: the lengths are the same array."""
    plan = ChunkPlan(runs_of([(1, 2), (2, 3), (9, 9)]), runs_of([(4, 4)]))
    found = []
    for number in range(4):
        layer = LayerLayout(str(number), (TensorLayout(number << 30, 64),), TensorLayout((number << 30) + 4096, 16))
        found.append(plan.descriptors(layer, layer))
    assert all(descriptors.lengths is found[0].lengths for descriptors in found)
    dense = LayerLayout("dense", (TensorLayout(0, 64),))
    assert plan.descriptors(dense, dense).nbytes == 3 * 64


def test_a_prepared_layer_serves_every_chunk() -> None:
    """What a connection keeps of a layer carries nothing over from one chunk to the next."""
    source = LayerLayout("l", (TensorLayout(2**63, 64), TensorLayout(2**40, 8)), TensorLayout(2**41, 16))
    local = LayerLayout("l", (TensorLayout(0, 64), TensorLayout(2**20, 8)), TensorLayout(2**21, 16))
    pair = LayerPair.of(source, local)
    for main, indexer in (([(1, 2)], []), ([], [(3, 4), (4, 5)]), ([(1, 2), (5, 3)], [(9, 9)])):
        prepared = ChunkPlan(runs_of(main), runs_of(indexer)).of_pair(pair)
        direct = ChunkPlan(runs_of(main), runs_of(indexer)).descriptors(source, local)
        for left, right in zip(prepared[:3], direct[:3], strict=True):
            assert left.tolist() == right.tolist()
        assert split_into_blocks(prepared, local, [len(main), len(main), 1 if indexer else 0]) == obvious(
            [main, main, indexer], source, local
        )


def test_same_sizes_in_other_roles_are_not_confused() -> None:
    """(main, main) and (main, indexer) of equal block sizes follow different block lists."""
    plan = ChunkPlan(runs_of([(1, 1)]), runs_of([(5, 6), (7, 8)]))
    a, b = TensorLayout(0, 64), TensorLayout(1 << 20, 64)
    two_mains, with_indexer = LayerLayout("l", (a, b)), LayerLayout("l", (a,), b)
    for _ in range(2):
        assert plan.descriptors(two_mains, two_mains).peer.tolist() == [64, (1 << 20) + 64]
        assert plan.descriptors(with_indexer, with_indexer).peer.tolist() == [64, (1 << 20) + 320, (1 << 20) + 448]
