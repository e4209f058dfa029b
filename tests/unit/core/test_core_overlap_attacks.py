"""Attacks on overlapping reads: children that end, leases that lapse and books that close while two reads run."""

import pytest
from core_pull import LAYERS, PEER, PREFILL, Pull

from rd2h.children import FailureKind, Finished, Outcome
from rd2h.decode.planner import OVERLAP_FROM_S
from rd2h.decode.steps import ReadEnd, Turn
from rd2h.engines import READ_OK, ReadResult
from rd2h.wire import ReadDone, ReadFailed

BROKEN = ReadResult(5, "broken")
HOLD_S = 5.0
"""As in the options that Pull leaves alone."""


def slow_pull() -> Pull:
    """A connection whose last read took long; its blocks are too large to be read together."""
    pull = Pull(5 << 20)
    pull.connection.read_s = OVERLAP_FROM_S
    return pull


def finish_all(pull: Pull) -> None:
    """Go on with the turn until it is over."""
    while pull.step() is not None:
        pass


def reports(pull: Pull, now_s: float) -> list[Finished]:
    return pull.book.take_finished(now_s)


def test_a_read_error_holds_the_blocks_of_a_child_that_left_the_chunk_while_it_ran() -> None:
    """The abort takes the child out of the chunk when the next layer is planned; bytes may still land in its blocks."""
    pull = slow_pull()
    pull.ready(0)
    pull.ready(1)
    first = pull.read()
    pull.book.abort(["request"], 0.0)
    second = pull.read()
    assert second.nothing_to_read
    pull.returned(second)
    finish_all(pull)
    assert pull.returned(first, BROKEN)
    assert pull.replies(pull.step()) == [ReadFailed(0, "broken", 100)]
    finish_all(pull)
    assert reports(pull, HOLD_S / 2) == [], "an engine error may be followed by late bytes"
    (report,) = reports(pull, HOLD_S)
    assert report.outcome is Outcome.ABORTED


@pytest.mark.parametrize("why", ["error", "lease"])
def test_a_repeated_layer_that_fails_after_the_end_spoils_the_child(why: str) -> None:
    """Its read wrote into blocks that counted as complete; the child has left the chunk by then."""
    pull = slow_pull()
    for layer in range(LAYERS - 1):
        pull.ready(layer)
        assert pull.returned(pull.read())
        assert pull.replies(pull.step()) == [ReadDone(layer, 100 + layer)]
        finish_all(pull)
    pull.ready(LAYERS - 1, last=True)
    pull.ready(0)
    last, again = pull.read(), pull.read()
    assert pull.returned(last)
    assert pull.replies(pull.step()) == [ReadDone(LAYERS - 1, 100 + LAYERS - 1)]
    assert reports(pull, 0.0) == [], "the repeated layer is being read"
    pull.ready(1)
    assert pull.read().nothing_to_read, "the child takes no more"
    if why == "error":
        pull.returned(again, BROKEN)
    else:
        pull.connection.lease.start_ns = None
        pull.returned(again)
    (reply,) = pull.replies(pull.step())
    assert isinstance(reply, ReadFailed)
    (report,) = reports(pull, HOLD_S)
    assert report.outcome is Outcome.FAILED
    assert report.kind is (FailureKind.READ_ERROR if why == "error" else FailureKind.LEASE_EXPIRED)


def test_the_lease_counts_until_the_read_returned_not_until_somebody_looked_at_the_clock_before() -> None:
    """Who has the turn took the time, and stood still until the read of another thread had returned."""
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    pull.ready(1)
    assert pull.connection.busy, "another thread has the turn"
    now_ns = 1
    late_ns = now_ns + pull.connection.lease.duration_ns + 1
    assert not pull.book.read_returned(pull.connection, first, ReadEnd(READ_OK, 1.0, late_ns))
    (reply,) = pull.replies(pull.book.next_step(pull.connection, 0.0, now_ns))
    assert isinstance(reply, ReadFailed)
    assert "lease" in reply.error
    (report,) = reports(pull, 0.0)
    assert report.kind is FailureKind.LEASE_EXPIRED


def test_reads_end_in_the_books_of_a_closed_puller_though_nobody_takes_the_turn() -> None:
    pull = slow_pull()
    pull.ready(0)
    pull.ready(1)
    first = pull.read()
    assert first.turn is Turn.PASSED_ON
    pull.book.abort(["request"], 0.0)
    pull.book.close()  # the thread that should have taken the turn has ended
    assert pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    assert pull.step() is None
    assert pull.book.counts() == (0, 0, 0)
    (report,) = reports(pull, 0.0)
    assert report.outcome is Outcome.ABORTED


@pytest.mark.parametrize("returned", ["first", "second", "neither"])
def test_a_forgotten_connection_keeps_its_blocks_until_both_reads_have_returned(returned: str) -> None:
    pull = slow_pull()
    pull.ready(0)
    pull.ready(1)
    first, second = pull.read(), pull.read()
    early = {"first": [first], "second": [second], "neither": []}[returned]
    late = [task for task in (first, second) if task not in early]
    for task in early:
        pull.returned(task)
        finish_all(pull)
    pull.book.drop(PEER, "gone", 0.0)
    assert reports(pull, 0.0) == []
    for task in late:
        assert reports(pull, 0.0) == []
        pull.returned(task)
        finish_all(pull)
    (report,) = reports(pull, 0.0)
    assert (report.outcome, report.kind) == (Outcome.FAILED, FailureKind.PEER_LOST)
    assert pull.book.counts() == (0, 0, 0)
    assert not pull.connection.busy


def test_a_generation_that_leaves_while_two_reads_run_fails_its_child_after_both() -> None:
    pull = slow_pull()
    for layer in range(3):
        pull.ready(layer)
    first, second = pull.read(), pull.read()
    pull.book.trust(frozenset(), 0.0)
    for task in (second, first):
        assert reports(pull, 0.0) == []
        pull.returned(task)
        finish_all(pull)
    (report,) = reports(pull, 0.0)
    assert report.outcome is Outcome.FAILED
    assert pull.connection.parked, "the third layer waits for the generation to be registered again"
    assert pull.book.unpark_due(100.0) == [pull.connection]
    (reply,) = pull.replies(pull.book.next_step(pull.connection, 100.0, 1))
    assert isinstance(reply, ReadFailed)
    assert "not registered" in reply.error
    assert pull.step() is None


def test_reads_that_return_while_the_next_message_is_parked_are_answered_at_once() -> None:
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    pull.book.trust(frozenset(), 0.0)
    pull.ready(1)
    assert pull.step() is None
    assert pull.connection.parked
    pull.ready(2)
    assert not pull.connection.busy
    assert pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    assert pull.step() is None
    assert pull.book.trust(frozenset({PREFILL}), 0.0) == [pull.connection]
    assert pull.connection.busy


def test_a_wake_from_parking_while_a_read_holds_its_turn_is_not_lost() -> None:
    """The thread that finishes a read has the turn when the destination comes; it must go on by itself."""
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    pull.book.trust(frozenset(), 0.0)
    pull.ready(1)
    assert pull.step() is None
    assert pull.returned(first)
    assert pull.replies(pull.step()) == [ReadDone(0, 100)]
    assert pull.book.trust(frozenset({PREFILL}), 0.0) == [], "somebody has the turn already"
    assert pull.step() is not None


def test_the_hold_after_an_error_begins_when_the_read_returned() -> None:
    pull = slow_pull()
    pull.ready(0)
    first = pull.read()
    pull.ready(1)
    stood_still_s = 100.0
    pull.book.read_returned(pull.connection, first, ReadEnd(BROKEN, 1.0, int(stood_still_s * 1e9)))
    pull.replies(pull.step())
    finish_all(pull)
    assert reports(pull, stood_still_s + HOLD_S / 2) == []
    assert len(reports(pull, stood_still_s + HOLD_S)) == 1
