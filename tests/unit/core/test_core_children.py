"""A child is reported exactly once, never while a read on it is in flight, and done only with proof."""

import numpy as np
import pytest

from rd2h import children
from rd2h.children import ChildSpec, ChildState, ChildTable, Finished, Outcome
from rd2h.errors import RequestError, StateError
from rd2h.ledger import BlockRange

IDLE_S = 10.0
NOTHING = BlockRange(0, 0)


def token(number: int) -> bytes:
    return number.to_bytes(16, "big")


def spec(number: int, *, request: str = "", external: str = "", blocks: int = 4, start: int = 0) -> ChildSpec:
    ids = np.arange(100 * number, 100 * number + blocks, dtype=np.int64)
    return ChildSpec(token(number), request or f"r{number}", external or f"x{number}", ids, start, ids, start)


def table_with(*numbers: int, now_s: float = 0.0) -> ChildTable:
    table = ChildTable(IDLE_S)
    for number in numbers:
        table.add(spec(number), now_s)
    return table


def deliver(table: ChildTable, number: int, source: object, member: int = 0, ratio: int = 1, blocks: int = 4) -> None:
    """All layers of blocks 0..``blocks``, as the reader would record them."""
    child = table.get(token(number))
    assert child is not None
    child.admit(source, member, ratio, True).advance(member, BlockRange(0, blocks), BlockRange(0, blocks))


def outcomes(table: ChildTable) -> list[tuple[str, Outcome]]:
    return [(report.request_id, report.outcome) for report in table.take_finished()]


def assert_empty(table: ChildTable) -> None:
    """Nothing stays behind except the memory of tokens, which is bounded."""
    assert len(table) == table.reads_in_flight == 0
    assert table.take_finished() == []
    assert not table._children
    assert not table._tokens
    assert not table._external
    assert not table._fenced
    assert not table._reads


def test_done_after_every_contributor_has_delivered_and_said_so() -> None:
    table = table_with(1)
    for member in (1, 0):
        assert outcomes(table) == []
        deliver(table, 1, f"connection {member}", member, ratio=2)
        table.contributor_done(token(1), member, 1.0)
        table.contributor_done(token(1), member, 1.0)
    assert table.take_finished() == [Finished("r1", token(1), Outcome.DONE, "")]
    assert_empty(table)


@pytest.mark.parametrize("delivered", [0, 3])
def test_the_end_without_the_blocks_fails(delivered: int) -> None:
    """Case L7: a message was lost, but the last layer says done."""
    table = table_with(1)
    deliver(table, 1, "c", blocks=delivered)
    table.contributor_done(token(1), 0, 1.0)
    (report,) = table.take_finished()
    assert report.outcome is Outcome.FAILED
    assert f"main blocks {delivered}..4" in report.reason
    assert_empty(table)


def test_the_end_before_anything_fails() -> None:
    table = table_with(1)
    table.contributor_done(token(1), 0, 1.0)
    (report,) = table.take_finished()
    assert report.outcome is Outcome.FAILED
    assert "every block" in report.reason


def test_the_end_of_a_contributor_that_does_not_exist_fails() -> None:
    """A Prefill that knows the token but speaks for rank 3 of 4, where 2 contributors were seen, harms nobody else."""
    table = table_with(1, 2)
    deliver(table, 1, "c", 0, ratio=2)
    table.contributor_done(token(1), 3, 1.0)
    (report,) = table.take_finished()
    assert report.outcome is Outcome.FAILED
    assert "contributor 3" in report.reason
    assert "2" in report.reason
    assert len(table) == 1


def test_abort_while_waiting() -> None:
    """Case L1: reported at once, whatever Prefill sends later."""
    table = table_with(1, 2)
    assert table.abort("r1", 1.0) == token(1)
    assert table.take_finished() == [Finished("r1", token(1), Outcome.ABORTED, "aborted")]
    assert table.abort("r1", 1.0) is None
    table.contributor_done(token(1), 0, 2.0)
    table.fail(token(1), "late", 2.0, hold_s=5.0)
    assert outcomes(table) == []
    assert table.get(token(1)) is None
    assert table.why_gone(token(1)) == "aborted"
    with pytest.raises(StateError):
        table.begin_read([token(2), token(1)])
    assert table.reads_in_flight == 0
    assert table.abort("never seen", 1.0) is None


def test_abort_during_a_read_waits_for_its_return() -> None:
    """Case L4."""
    table = table_with(1, 2)
    slow = table.begin_read([token(1), token(2)])
    other = table.begin_read([token(1)])
    table.abort("r1", 1.0)
    assert table.get(token(1)).state is ChildState.FENCED  # type: ignore[union-attr]
    with pytest.raises(StateError, match="fenced"):
        table.begin_read([token(1)])
    for now_s in (2.0, 9.0):
        table.expire(now_s)
        assert outcomes(table) == []
    table.end_read(other, 9.5)
    assert outcomes(table) == []
    table.end_read(slow, 9.6)
    assert outcomes(table) == [("r1", Outcome.ABORTED)]
    assert [len(table), table.reads_in_flight] == [1, 0]


def test_blocks_are_held_while_bytes_may_still_land() -> None:
    """Case L5; the hold begins when the error is known, and a later error prolongs it."""
    table = table_with(1)
    first, second = table.begin_read([token(1)]), table.begin_read([token(1)])
    table.fail(token(1), "engine error", 10.0, hold_s=3.0)
    table.end_read(first, 10.0)
    table.fail(token(1), "engine error again", 12.0, hold_s=3.0)
    table.end_read(second, 12.0)
    table.expire(14.9)
    assert outcomes(table) == []
    table.expire(15.0)
    assert table.take_finished() == [Finished("r1", token(1), Outcome.FAILED, "engine error")]
    assert_empty(table)


def test_an_abort_does_not_shorten_a_hold() -> None:
    table = table_with(1)
    table.fail(token(1), "engine error", 10.0, hold_s=3.0)
    table.abort("r1", 10.5)
    table.expire(12.9)
    assert outcomes(table) == []
    table.expire(13.0)
    assert outcomes(table) == [("r1", Outcome.FAILED)]


def test_a_hold_after_an_abort() -> None:
    table = table_with(1)
    read = table.begin_read([token(1)])
    table.abort("r1", 1.0)
    table.fail(token(1), "engine error", 2.0, hold_s=3.0)
    table.end_read(read, 2.0)
    table.expire(4.9)
    assert outcomes(table) == []
    table.expire(5.0)
    assert outcomes(table) == [("r1", Outcome.ABORTED)]


def test_a_read_that_fails_after_the_end_was_reported_by_all_spoils_the_child() -> None:
    """A second read into a complete child returns an error: its bytes are no longer known to be good."""
    table = table_with(1)
    deliver(table, 1, "c")
    read = table.begin_read([token(1)])
    table.contributor_done(token(1), 0, 1.0)
    assert outcomes(table) == []
    table.fail(token(1), "engine error", 2.0, hold_s=1.0)
    table.end_read(read, 2.0)
    table.expire(3.0)
    assert table.take_finished() == [Finished("r1", token(1), Outcome.FAILED, "engine error")]


def test_failed_and_then_done_is_one_report() -> None:
    """Case L8."""
    table = table_with(1)
    deliver(table, 1, "c")
    table.fail(token(1), "read failed", 1.0)
    table.contributor_done(token(1), 0, 1.0)
    table.fail(token(1), "again", 1.0)
    table.abort("r1", 1.0)
    assert table.take_finished() == [Finished("r1", token(1), Outcome.FAILED, "read failed")]
    assert_empty(table)


def test_an_id_used_again_is_another_request() -> None:
    """Case L6: one after another; what is late for the first does not touch the second."""
    table = table_with(1)
    read = table.begin_read([token(1)])
    table.abort("r1", 1.0)
    with pytest.raises(StateError, match="'r1'"):
        table.add(spec(2, request="r1", external="x1"), 1.0)
    table.end_read(read, 2.0)
    assert outcomes(table) == [("r1", Outcome.ABORTED)]
    table.add(spec(2, request="r1", external="x1"), 2.0)
    assert table.token_of_request("r1") == table.token_of_external("x1") == token(2)
    table.fail(token(1), "late", 3.0)
    table.contributor_done(token(1), 0, 3.0)
    assert outcomes(table) == []
    deliver(table, 2, "c")
    table.contributor_done(token(2), 0, 4.0)
    assert table.take_finished() == [Finished("r1", token(2), Outcome.DONE, "")]
    assert_empty(table)


def test_a_refused_token_does_not_end_a_living_request_of_the_same_id() -> None:
    table = table_with(1)
    table.refuse(token(2), "too late")
    with pytest.raises(StateError, match="'r1'"):
        table.add(spec(2, request="r1"), 1.0)
    assert outcomes(table) == []


def test_a_token_can_be_added_once() -> None:
    table = table_with(1)
    with pytest.raises(StateError, match="already in use"):
        table.add(spec(1, request="other"), 0.0)
    assert len(table) == 1


def test_two_children_of_one_external_name() -> None:
    """A legacy Prefill cannot tell them apart: the name stays with the first and never moves to the second."""
    table = table_with()
    table.add(spec(1, external="same"), 0.0)
    table.add(spec(2, external="same"), 5.0)
    assert table.token_of_external("same") == token(1)
    table.abort("r1", 5.0)
    assert table.token_of_external("same") is None
    assert table.expire(5.0 + IDLE_S) == [token(2)]
    assert outcomes(table) == [("r1", Outcome.ABORTED), ("r2", Outcome.FAILED)]
    assert_empty(table)


def test_a_destination_that_comes_after_the_refusal_fails_at_once() -> None:
    """Case L9: the parked message was answered; the child could only be served in part."""
    table = table_with(1)
    table.refuse(token(2), "its destination was not known in time")
    table.refuse(token(1), "a living child is not touched by this")
    assert table.why_gone(token(1)) is None
    table.add(spec(2), 1.0)
    assert table.take_finished() == [Finished("r2", token(2), Outcome.FAILED, "its destination was not known in time")]
    assert len(table) == 1


def test_no_progress_for_the_idle_time() -> None:
    table = table_with(1, 2, now_s=5.0)
    assert table.expire(5.0 + IDLE_S - 0.1) == []
    read = table.begin_read([token(2)])
    table.end_read(read, 5.0 + IDLE_S - 0.1)
    assert table.expire(5.0 + IDLE_S) == [token(1)]
    (report,) = table.take_finished()
    assert (report.outcome, report.reason) == (Outcome.FAILED, "no KV arrived for 10 s")
    assert table.expire(5.0 + 2 * IDLE_S - 0.2) == []
    assert table.expire(5.0 + 2 * IDLE_S) == [token(2)]
    assert len(table.take_finished()) == 1
    assert_empty(table)


def test_a_lost_connection_fails_its_children_only() -> None:
    """Case L11: contributor 1 of 2 dies."""
    table = table_with(1, 2, 3)
    left, right, other = object(), object(), object()
    for number in (1, 2):
        child = table.get(token(number))
        assert child is not None
        child.admit(left, 0, 2, True)
    table.get(token(1)).admit(right, 1, 2, True)  # type: ignore[union-attr]
    table.get(token(3)).admit(other, 0, 1, True)  # type: ignore[union-attr]
    assert table.fail_source(right, "lost", 1.0) == [token(1)]
    assert table.take_finished() == [Finished("r1", token(1), Outcome.FAILED, "lost")]
    assert table.fail_source(right, "lost", 1.0) == []
    read = table.begin_read([token(3)])
    table.abort("r3", 1.0)
    assert table.fail_source(other, "lost", 1.0) == [], "it has ended already"
    assert table.fail_source(left, "lost", 1.0) == [token(2)]
    table.end_read(read, 1.0)
    assert outcomes(table) == [("r2", Outcome.FAILED), ("r3", Outcome.ABORTED)]
    assert_empty(table)


def test_a_second_contributor_of_a_ratio_one_peer_is_refused() -> None:
    """How mixed builds write twice: another ratio, or the same member from another connection."""
    table = table_with(1)
    child = table.get(token(1))
    assert child is not None
    ledger = child.admit("a", 0, 1, True)
    assert child.admit("a", 0, 1, True) is ledger
    with pytest.raises(RequestError, match="ratio 2 differs from 1"):
        child.admit("b", 1, 2, True)
    with pytest.raises(RequestError, match="contributor 0 already comes from another"):
        child.admit("b", 0, 1, True)
    assert child.sources == {0: "a"}


def test_ranges_of_a_spec() -> None:
    ids = np.array([7, 8, 9])
    both = ChildSpec(token(1), "r", "x", ids, 5, ids[:2], 6)
    assert both.main_range == BlockRange(5, 8)
    assert both.indexer_range == BlockRange(6, 8)


def test_epoch_moves_when_the_pullable_children_change() -> None:
    table = table_with()
    seen = [table.epoch]
    table.add(spec(1), 0.0)
    seen.append(table.epoch)
    table.add(spec(2), 0.0)
    seen.append(table.epoch)
    table.abort("r1", 0.0)
    seen.append(table.epoch)
    deliver(table, 2, "c")
    table.contributor_done(token(2), 0, 0.0)
    seen.append(table.epoch)
    assert len(set(seen)) == len(seen)


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MAX_CHILDREN", 3)
    monkeypatch.setattr(children, "MAX_REMEMBERED", 2)
    table = table_with(1, 2, 3)
    table.add(spec(4), 0.0)
    (report,) = table.take_finished()
    assert (report.request_id, report.outcome) == ("r4", children.Outcome.FAILED)
    assert "3 children" in report.reason
    for number in (1, 2, 3):
        table.abort(f"r{number}", 0.0)
    assert [table.why_gone(token(number)) for number in (1, 2, 3)] == [None, "aborted", "aborted"]
    for number in range(10, 20):
        table.refuse(token(number), "refused")
    assert len(table._remembered) == 2
    table.add(spec(4), 0.0)
    assert len(table) == 1
