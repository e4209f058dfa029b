"""Prefill's scheduler half: which blocks become readable in each step, and what a step overwrites."""

import pytest
from connector_standins import (
    BLOCK,
    DENSE,
    P,
    RecordingControl,
    blocks,
    child_params,
    dispatch,
    prefill_half,
    scheduled,
    told,
)

from rd2h.groups import CacheGroups

# --- ranges ---


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33, 48])
def test_one_chunk_tells_every_block_rounded_up(prompt: int) -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params()), prompt)
    count = -(-prompt // BLOCK)
    main, indexer = blocks(count)
    step = half.step([scheduled(P, 0, prompt, (main, indexer), fresh=True)], [])
    (publication,) = step.publications
    assert told(publication) == ("cmpl-x-0-aaaaaaaa", 0, main, indexer, True)


def test_chunks_tell_whole_blocks_and_the_rest_at_the_end() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params()), 100)
    main, indexer = blocks(7)
    seen = []
    for computed, now, new, fresh in [
        (0, 40, slice(0, 3), True),
        (40, 40, slice(3, 5), False),
        (80, 20, slice(5, 7), False),
    ]:
        step = half.step([scheduled(P, computed, now, (main[new], indexer[new]), fresh=fresh)], [])
        (publication,) = step.publications
        seen.append(told(publication)[1:])
    assert seen == [
        (0, main[0:2], indexer[0:2], False),
        (2, main[2:5], indexer[2:5], False),
        (5, main[5:7], indexer[5:7], True),
    ]
    # Decoding steps of the same request tell nothing more.
    assert half.step([scheduled(P, 100, 1)], []).publications == []


def test_a_chunk_within_a_block_tells_nothing_yet() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params()), 40)
    main, indexer = blocks(3)
    assert half.step([scheduled(P, 0, 10, (main[:1], indexer[:1]), fresh=True)], []).publications == []
    (publication,) = half.step([scheduled(P, 10, 30, (main[1:], indexer[1:]))], []).publications
    assert told(publication)[1:] == (0, main, indexer, True)


def test_whole_prompt_in_prefills_prefix_cache_is_told_whole() -> None:
    """L13: vLLM computes only the last block anew; the blocks it found are published all the same."""
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params()), 64)
    main, indexer = blocks(4)
    (publication,) = half.step([scheduled(P, 48, 16, (main, indexer), fresh=True)], []).publications
    assert told(publication)[1:] == (0, main, indexer, True)


def test_blocks_cached_on_decode_are_not_told() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params(remote_cached_tokens=32)), 100)
    main, indexer = blocks(7)
    first = half.step([scheduled(P, 0, 60, (main[:4], indexer[:4]), fresh=True)], [])
    assert [told(p)[1:] for p in first.publications] == [(2, main[2:3], indexer[2:3], False)]
    last = half.step([scheduled(P, 60, 40, (main[4:], indexer[4:]))], [])
    assert [told(p)[1:] for p in last.publications] == [(3, main[3:7], indexer[3:7], True)]


def test_prefix_hits_on_both_sides() -> None:
    """Prefill found 48 tokens, Decode has 16: blocks 1.. come, whoever computed them."""
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params(remote_cached_tokens=16)), 70)
    main, indexer = blocks(5)
    (publication,) = half.step([scheduled(P, 48, 22, (main, indexer), fresh=True)], []).publications
    assert told(publication)[1:] == (1, main[1:], indexer[1:], True)


def test_children_of_one_prompt_have_their_own_ranges() -> None:
    half = prefill_half(RecordingControl())
    a = child_params("0_cmpl-x-0-aaaaaaaa", 1, remote_cached_tokens=0, choice_index=0)
    b = child_params("1_cmpl-x-0-aaaaaaaa", 2, remote_cached_tokens=64, choice_index=1)
    half.track(P, dispatch(a, b), 80)
    main, indexer = blocks(5)
    step = half.step([scheduled(P, 0, 80, (main, indexer), fresh=True)], [])
    assert [told(p) for p in step.publications] == [
        ("0_cmpl-x-0-aaaaaaaa", 0, main, indexer, True),
        ("1_cmpl-x-0-aaaaaaaa", 4, main[4:], indexer[4:], True),
    ]


def test_a_child_that_has_everything_is_still_told_the_end() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params(remote_cached_tokens=4096)), 32)
    main, indexer = blocks(2)
    (publication,) = half.step([scheduled(P, 0, 32, (main, indexer), fresh=True)], []).publications
    assert told(publication)[2:] == ([], [], True)


def test_group_order_does_not_matter() -> None:
    half = prefill_half(RecordingControl(), groups=CacheGroups(main=1, indexer=0, block_size_tokens=BLOCK))
    half.track(P, dispatch(child_params()), 20)
    main, indexer = blocks(2)
    (publication,) = half.step([scheduled(P, 0, 20, (indexer, main), fresh=True)], []).publications
    assert told(publication)[2:4] == (main, indexer)


def test_dense_model_tells_no_indexer() -> None:
    half = prefill_half(RecordingControl(), contract=DENSE, groups=CacheGroups(0, 0, BLOCK))
    half.track(P, dispatch(child_params()), 20)
    main, _ = blocks(2)
    (publication,) = half.step([scheduled(P, 0, 20, (main,), fresh=True)], []).publications
    assert told(publication)[2:4] == (main, [])


# --- preemption ---


def test_preempted_at_the_last_token_and_resumed_in_two_chunks() -> None:
    """L12: the blocks told last are those of the resumed life; nothing is told twice."""
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params()), 64)
    old_main, old_indexer = blocks(4, 100)
    step = half.step([scheduled(P, 0, 63, (old_main, old_indexer), fresh=True)], [])
    assert [told(p)[1:] for p in step.publications] == [(0, old_main[:3], old_indexer[:3], False)]
    # Preempted: another request gets its blocks. vLLM asks again for the connector's view when it resumes.
    half.track(P, dispatch(child_params()), 64)
    main, indexer = blocks(4, 500)
    step = half.step([scheduled(P, 0, 40, (main[:3], indexer[:3]), fresh=True)], [])
    assert step.publications == []
    assert step.writes.main == set(main[:3])
    step = half.step([scheduled(P, 40, 24, (main[3:], indexer[3:]))], [])
    assert [told(p)[1:] for p in step.publications] == [(3, main[3:], indexer[3:], True)]


def test_resumed_from_its_own_prefix_cache() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params()), 64)
    main, indexer = blocks(4)
    half.step([scheduled(P, 0, 48, (main[:3], indexer[:3]), fresh=True)], [])
    again = [*main[:3], 900], [*indexer[:3], 1900]
    step = half.step([scheduled(P, 48, 16, again, fresh=True)], [])
    assert [told(p)[1:] for p in step.publications] == [(3, [900], [1900], True)]
    assert step.writes.main == {900}


# --- what a step overwrites ---


def test_writes_are_the_blocks_of_the_tokens_computed_now() -> None:
    half = prefill_half()
    main, indexer = blocks(7)
    step = half.step([scheduled("a", 40, 30, (main[:5], indexer[:5]), fresh=True)], [])
    assert step.writes.main == set(main[2:5])
    assert step.writes.indexer == set(indexer[2:5])
    step = half.step([scheduled("a", 70, 1)], [])
    assert step.writes.main == {main[4]}


def test_blocks_behind_the_tokens_computed_now_are_written_too() -> None:
    """vLLM allocates them for tokens that a draft model looks ahead to: it writes their rows, or zeroes the blocks."""
    half = prefill_half()
    main, indexer = blocks(5)
    step = half.step([scheduled("a", 0, 64, (main, indexer), fresh=True)], [])
    assert step.writes.main == set(main)
    assert step.writes.indexer == set(indexer)
    step = half.step([scheduled("a", 64, 1, ([900], [1900]))], [])
    assert step.writes.main == {main[4], 900}


@pytest.mark.parametrize(
    ("first", "tokens", "loaded"), [(0, 32, slice(0, 2)), (16, 48, slice(1, 4)), (16, 20, slice(1, 3))]
)
def test_what_a_connector_beside_ours_loads_is_overwritten_too(first: int, tokens: int, loaded: slice) -> None:
    half = prefill_half()
    main, indexer = blocks(-(-(first + tokens + 3) // BLOCK))
    half.loads((main, indexer), first, tokens)
    step = half.step([scheduled("a", first + tokens, 3, (main, indexer), fresh=True)], [])
    assert step.writes.main == {*main[loaded], main[-1]}
    assert step.writes.indexer == {*indexer[loaded], indexer[-1]}
    # Once, in the step in which the load begins; an asynchronous one begins with no request scheduled.
    assert half.step([], []).writes.main == set()
    half.loads((main, indexer), first, tokens)
    assert half.step([], []).writes.main == set(main[loaded])


def test_same_id_again_in_the_step_after_the_first_ended() -> None:
    """With vLLM's random suffix off an id may come back while its end is still being told."""
    half = prefill_half()
    half.step([scheduled("a", 0, 16, blocks(1, 100), fresh=True)], [])
    step = half.step([scheduled("a", 0, 16, blocks(1, 300), fresh=True)], ["a"])
    assert step.writes.main == {300}
