"""Coverage: a contributor is complete if, and only if, every block of every component was delivered in order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.errors import RequestError
from rd2h.ledger import BlockRange, CoverageLedger

NOTHING = BlockRange(0, 0)


def test_chunks_in_order_complete_a_contributor() -> None:
    ledger = CoverageLedger(BlockRange(2, 10), BlockRange(1, 5), contributors=2)
    for main, indexer in ((BlockRange(2, 5), BlockRange(1, 3)), (BlockRange(5, 10), BlockRange(3, 4))):
        ledger.advance(0, main, indexer)
        assert not ledger.complete(0)
    ledger.advance(0, NOTHING, BlockRange(4, 5))
    assert ledger.complete(0)
    assert not ledger.complete(1)
    assert not ledger.all_complete()
    ledger.advance(1, BlockRange(2, 10), BlockRange(1, 5))
    assert ledger.all_complete()


@pytest.mark.parametrize(
    ("main", "indexer", "words"),
    [
        (BlockRange(4, 10), BlockRange(1, 5), "main blocks 3..4 never arrived"),
        (BlockRange(9, 10), NOTHING, "main blocks 3..9 never arrived"),
        (BlockRange(3, 10), BlockRange(3, 5), "indexer blocks 1..3 never arrived"),
    ],
)
def test_a_lost_chunk_is_noticed_at_the_next(main: BlockRange, indexer: BlockRange, words: str) -> None:
    ledger = CoverageLedger(BlockRange(2, 10), BlockRange(1, 5), contributors=1)
    ledger.advance(0, BlockRange(2, 3), NOTHING)
    with pytest.raises(RequestError) as raised:
        ledger.advance(0, main, indexer)
    assert words in str(raised.value)
    assert not ledger.complete(0)


def test_a_lost_last_chunk_leaves_the_contributor_incomplete() -> None:
    ledger = CoverageLedger(BlockRange(0, 10), None, contributors=1)
    ledger.advance(0, BlockRange(0, 9), NOTHING)
    assert not ledger.complete(0)
    assert ledger.missing(0) == "contributor 0: main blocks 9..10"


def test_duplicates_and_overlaps_do_not_advance_more_than_they_bring() -> None:
    ledger = CoverageLedger(BlockRange(0, 10), BlockRange(0, 10), contributors=1)
    for _ in range(20):
        ledger.advance(0, BlockRange(0, 4), BlockRange(0, 4))
    assert not ledger.complete(0)
    ledger.advance(0, BlockRange(2, 6), BlockRange(3, 4))
    ledger.advance(0, BlockRange(1, 3), BlockRange(1, 9))
    assert ledger.missing(0) == "contributor 0: main blocks 6..10, indexer blocks 9..10"
    ledger.advance(0, BlockRange(6, 10), BlockRange(0, 10))
    assert ledger.complete(0)


def test_one_contributor_does_not_cover_for_another() -> None:
    ledger = CoverageLedger(BlockRange(0, 4), BlockRange(0, 4), contributors=3)
    for member in (0, 2):
        for _ in range(3):
            ledger.advance(member, BlockRange(0, 4), BlockRange(0, 4))
    assert [ledger.complete(member) for member in range(3)] == [True, False, True]
    assert not ledger.all_complete()


def test_without_an_indexer_its_blocks_do_not_count() -> None:
    ledger = CoverageLedger(BlockRange(0, 2), None, contributors=1)
    ledger.advance(0, BlockRange(0, 2), BlockRange(70, 80))
    assert ledger.complete(0)


def test_nothing_to_deliver_is_complete_from_the_start() -> None:
    """All of a prompt was cached on Decode; an empty chunk may name any position."""
    ledger = CoverageLedger(BlockRange(5, 5), BlockRange(0, 0), contributors=2)
    assert ledger.all_complete()
    ledger.advance(0, BlockRange(9, 9), BlockRange(3, 3))
    assert ledger.all_complete()


chunk = st.tuples(st.integers(0, 9), st.integers(0, 6)).map(lambda pair: BlockRange(pair[0], pair[0] + pair[1]))
ranges = st.tuples(st.integers(0, 4), st.integers(0, 8)).map(lambda pair: BlockRange(pair[0], pair[0] + pair[1]))
chunks = st.lists(st.tuples(st.integers(0, 1), chunk, chunk), max_size=15)


@settings(deadline=None, max_examples=300)
@given(ranges, st.none() | ranges, chunks)
def test_the_ledger_against_sets_of_delivered_blocks(
    main: BlockRange, indexer: BlockRange | None, deliveries: list[tuple[int, BlockRange, BlockRange]]
) -> None:
    """Complete implies that every block was delivered; without a gap in the order, it is implied by it as well."""
    ledger = CoverageLedger(main, indexer, contributors=2)
    components = [main] if indexer is None else [main, indexer]
    delivered = [[set(range(c.start)) for c in components] for _ in range(2)]
    for member, *parts in deliveries:
        gap = False
        for have, part in zip(delivered[member], parts, strict=False):
            # What lies beyond a gap is not counted: it would hide the loss.
            if part.start < part.stop and not set(range(part.start)) <= have:
                gap = True
                break
            have |= set(range(part.start, part.stop))
        if gap:
            with pytest.raises(RequestError, match="never arrived"):
                ledger.advance(member, *parts)
        else:
            ledger.advance(member, *parts)
        expected = [
            all(set(range(c.start, c.stop)) <= have for c, have in zip(components, delivered[m], strict=True))
            for m in range(2)
        ]
        assert [ledger.complete(m) for m in range(2)] == expected
        assert ledger.all_complete() == all(expected)
