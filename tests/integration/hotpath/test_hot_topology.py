"""Unequal tensor parallelism: main is pulled exactly once, the indexer is complete on every Decode rank."""

from collections.abc import Callable

import pytest
from harness.cache import CacheSpec
from harness.pair import Decode, Prefill, Prompts, parts, pulled
from harness.waiting import wait_for
from harness.worker import Worker

SPEC = CacheSpec(layers=3, blocks=64, scale_bytes=16)
TakeWorker = Callable[[], Worker]
PAIRS = [(1, 1), (2, 1), (4, 2), (4, 1), (8, 2)]
# (prompt blocks, blocks that Decode has cached, chunk cuts): odd counts and starts, chunks of a single block.
SHAPES = [(1, 0, ()), (7, 0, (3,)), (9, 2, (3, 4)), (13, 5, (6, 11))]


@pytest.mark.parametrize("pooled", [True, False], ids=["shared pool", "own caches"])
@pytest.mark.parametrize(("p_tp", "d_tp"), PAIRS)
def test_every_byte_once(take_worker: TakeWorker, p_tp: int, d_tp: int, pooled: bool) -> None:
    prefill = Prefill.start(take_worker(), SPEC, tp_size=p_tp)
    decode = Decode.start(take_worker(), SPEC, tp_size=d_tp, split_main=pooled, trusted=[prefill.generation])
    prompts = Prompts(SPEC)
    main_bytes, indexer_bytes = sum(SPEC.main_bytes), SPEC.indexer_bytes + SPEC.scale_bytes
    blocks = 0
    for count, cached, cuts in SHAPES:
        child = prompts.child(count, start=cached)
        decode.add(child)
        decode.expect(child)
        for part in parts(child, decode.address, *cuts):
            prefill.publish([part])
        decode.wait_reported(child, "done")
        blocks += count - cached
    prefill.wait_settled()
    decode.check()
    decode.check_baseline()
    assert prefill.worker.call("failures") == {}
    # The right bytes lie everywhere; the counters tell that none of them was moved twice.
    by_rank = [stats["bytes_read"] for stats in decode.worker.call("rank_stats")]
    assert sum(by_rank) == SPEC.layers * blocks * (main_bytes * (1 if pooled else d_tp) + indexer_bytes * d_tp)
    if pooled and d_tp > 1:
        shares = [nbytes - SPEC.layers * blocks * indexer_bytes for nbytes in by_rank]
        assert max(shares) - min(shares) <= SPEC.layers * main_bytes * len(SHAPES)


@pytest.mark.parametrize(("p_tp", "silent"), [(2, 0), (2, 1), (4, 3)])
def test_every_contributor_counts(take_worker: TakeWorker, p_tp: int, silent: int) -> None:
    """A member with no blocks of its own still has to report before the child is complete."""
    prefill = Prefill.start(take_worker(), SPEC, tp_size=p_tp)
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation])
    child = Prompts(SPEC).child(1)
    decode.add(child)
    decode.expect(child)
    speaking = [rank for rank in range(p_tp) if rank != silent]
    prefill.publish(parts(child, decode.address), ranks=speaking)
    prefill.wait_settled()
    assert decode.outcomes(child) == []
    prefill.publish(parts(child, decode.address), ranks=[silent])
    decode.wait_reported(child, "done")
    decode.check()


def test_abort_with_several_ranks(take_worker: TakeWorker) -> None:
    prefill = Prefill.start(take_worker(), SPEC, tp_size=4)
    decode = Decode.start(take_worker(), SPEC, tp_size=2, split_main=True, trusted=[prefill.generation])
    prompts = Prompts(SPEC)
    gone, good = prompts.child(7), prompts.child(5)
    decode.add(gone, good)
    decode.worker.call("hold")
    prefill.publish([*parts(gone, decode.address), *parts(good, decode.address)], layers=[0])
    wait_for("reads run on both ranks", lambda: decode.worker.call("reads")[0] >= 2)
    decode.worker.call("abort", [gone.name])
    assert decode.outcomes(gone) == []
    decode.worker.call("release")
    decode.wait_reported(gone, "aborted")
    decode.give_away(gone, 0x77)
    decode.expect(good)
    prefill.publish([*parts(gone, decode.address), *parts(good, decode.address)], layers=[1, 2])
    decode.wait_reported(good, "done")
    decode.check()
    decode.check_baseline()


def test_the_harness_sees_a_missing_and_a_foreign_byte(take_worker: TakeWorker) -> None:
    """The checks of this folder are worth nothing if they cannot fail."""
    decode = Decode.start(take_worker(), SPEC)
    child = Prompts(SPEC).child(1)
    decode.check()
    decode.expect(child)
    main, indexer = pulled(child)
    missing = len(main) * len(SPEC.main_bytes) + len(indexer) * 2
    assert len(decode.worker.call("differences", decode.expected)) == missing * SPEC.layers > 0
    decode.expected.main.clear()
    decode.expected.indexer.clear()
    decode.worker.call("own", [5], [], 0x77)
    assert len(decode.worker.call("differences", decode.expected)) == len(SPEC.main_bytes) * SPEC.layers
