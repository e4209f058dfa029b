"""What a client says again, and when it stops."""

import math

import grpc
import pytest
from meta_builders import child
from rd2h_client.errors import MetaError, MetaRefusedError, MetaUnavailableError, QueueFullError
from rd2h_client.exchange_state import ExchangeState
from rd2h_client.operations import Cancellation, FailureReport, Withdrawal
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    ChildEnded,
    ExchangeResponse,
    Operation,
    OperationResult,
    RendezvousEvent,
)


class Sink:
    """An awaiting iterator that only counts."""

    def __init__(self) -> None:
        self.error: MetaError | None = None

    def offer(self, event: RendezvousEvent) -> bool:
        return event.HasField("closed")

    def fail(self, error: MetaError) -> None:
        self.error = error


class Bench:
    def __init__(self, max_open: int = 100) -> None:
        self.told: list[tuple[str, ChildEnded]] = []
        self.outcomes: list[MetaError | None] = []
        self.state = ExchangeState(max_open, lambda rid, ended: self.told.append((rid, ended)))

    def advertise(self, name: str = "a", rid: str = "r", expires_s: float = 100.0) -> None:
        self.state.advertise(rid, child(name), expires_s, 10.0, self.outcomes.append)

    def sent(self, now_s: float = 0.0) -> list[Operation]:
        batch = self.state.take_batch(now_s)
        return list(batch.operations) if batch else []

    def answer_all(self, code: int = 0, message: str = "", outcome: int = 0, now_s: float = 0.0) -> None:
        ids = [entry.op_id for entry in self.sent()]
        results = [OperationResult(op_id=op_id, code=code, message=message, outcome=outcome) for op_id in ids]
        answer = ExchangeResponse(operations_done=1_000_000)
        if code:
            answer.results.extend(results)
        self.state.receive(answer, now_s)


def test_an_advert_is_said_again_with_the_life_that_is_left() -> None:
    bench = Bench()
    bench.advertise(expires_s=100.0)
    bench.answer_all()
    bench.state.reconnected(40.0)
    (again,) = bench.sent(40.0)
    assert again.advertise.ttl_ms == 60_000
    assert bench.outcomes == [None]


def test_an_advert_whose_life_passed_meanwhile_ends_here() -> None:
    bench = Bench()
    bench.advertise(expires_s=100.0)
    bench.answer_all()
    bench.state.reconnected(100.0)
    assert bench.sent() == []
    ((rid, ended),) = bench.told
    assert (rid, ended.request_id, ended.outcome) == ("r", "a", OUTCOME_EXPIRED)
    assert bench.state.open_adverts == 0


@pytest.mark.parametrize(
    ("code", "outcome", "told"), [(9, OUTCOME_ABORTED, OUTCOME_ABORTED), (3, 0, OUTCOME_FAILED), (6, 0, OUTCOME_FAILED)]
)
def test_an_advert_that_is_refused_when_said_again_ends_here(code: int, outcome: int, told: int) -> None:
    bench = Bench()
    bench.advertise()
    bench.answer_all()
    bench.state.reconnected(1.0)
    bench.answer_all(code, "why", outcome)
    ((_, ended),) = bench.told
    assert (ended.outcome, ended.reason) == (told, "why")


def test_a_first_advert_that_is_refused_is_told_to_its_caller_only() -> None:
    bench = Bench()
    bench.advertise()
    bench.answer_all(9, "over", OUTCOME_ABORTED)
    assert isinstance(bench.outcomes[0], MetaRefusedError)
    assert (bench.told, bench.state.open_adverts) == ([], 0)


def test_ends_are_said_again_for_a_minute() -> None:
    bench = Bench()
    bench.state.end(Cancellation("gone", "left", OUTCOME_ABORTED), 5.0, 15.0, bench.outcomes.append)
    bench.answer_all(now_s=5.0)
    bench.state.reconnected(64.0)
    assert [entry.cancel.rendezvous_id for entry in bench.sent()] == ["gone"]
    bench.state.reconnected(64.0)
    assert len(bench.state.pending) == 1  # not twice, although the first was not answered
    bench.answer_all(now_s=64.5)
    bench.state.reconnected(65.0)
    assert bench.sent() == []


def test_an_await_is_said_again_with_the_life_that_is_left_or_fails() -> None:
    bench = Bench()
    sink = Sink()
    bench.state.await_children("r", 1, 50.0, sink, 50.0)
    bench.answer_all()
    bench.state.reconnected(20.0)
    (again,) = bench.sent(20.0)
    assert again.await_children.ttl_ms == 30_000
    bench.state.receive(ExchangeResponse(operations_done=1), 20.0)
    assert bench.state.next_wake_s() <= 50.0
    bench.state.wake(49.9)
    assert sink.error is None
    bench.state.wake(50.0)
    bench.state.reconnected(50.0)
    assert bench.sent() == []
    assert isinstance(sink.error, MetaUnavailableError)
    assert bench.state.open_awaits == 0


def test_memory_of_await_deadlines_follows_what_is_open() -> None:
    bench = Bench()
    for number in range(10_000):
        bench.state.await_children(f"r{number}", 1, 50.0, Sink(), 50.0)
        bench.state.forget_await(f"r{number}")
    assert len(bench.state._await_deadlines) < 2_000
    assert len(bench.state.pending) == 0


def test_a_refused_await_fails() -> None:
    bench = Bench()
    sink = Sink()
    bench.state.await_children("r", 1, 50.0, sink, 50.0)
    bench.answer_all(3, "expected_children: got 0")
    assert isinstance(sink.error, MetaRefusedError)
    assert bench.state.open_awaits == 0


def test_bounds() -> None:
    bench = Bench(max_open=1)
    bench.advertise("a")
    bench.advertise("a")  # the same child takes no more room
    with pytest.raises(QueueFullError, match="1 adverts are open"):
        bench.advertise("b")
    bench.answer_all()
    bench.state.await_children("r", 1, 50.0, Sink(), 50.0)
    with pytest.raises(QueueFullError, match="1 awaits are open"):
        bench.state.await_children("s", 1, 50.0, Sink(), 50.0)


def test_fail_all_reaches_awaits_and_operations_but_keeps_adverts_that_stand() -> None:
    bench = Bench()
    sink = Sink()
    bench.advertise("stands")
    bench.answer_all()
    bench.state.await_children("r", 1, 50.0, sink, 50.0)
    bench.advertise("new")
    bench.state.fail_all(MetaRefusedError(grpc.StatusCode.UNAUTHENTICATED, "no"))
    assert isinstance(sink.error, MetaRefusedError)
    assert isinstance(bench.outcomes[1], MetaRefusedError)
    assert bench.state.open_adverts == 1


def closed(rid: str) -> RendezvousEvent:
    event = RendezvousEvent(rendezvous_id=rid)
    event.closed.outcome = OUTCOME_ABORTED
    return event


def test_an_event_that_cannot_be_taken_ends_its_await_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    broken, whole = Sink(), Sink()
    broken.offer = lambda event: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    bench.state.await_children("broken", 1, 60.0, broken, 100.0)
    bench.state.await_children("whole", 1, 60.0, whole, 100.0)
    bench.state.receive(ExchangeResponse(events=[closed("broken"), closed("whole")]), 0.0)
    assert isinstance(broken.error, MetaError)
    assert "ZeroDivisionError" in broken.error.message
    assert whole.error is None
    assert bench.state.open_awaits == 0
    assert "could not be taken" in caplog.text


def test_a_callback_that_raises_costs_no_other_event() -> None:
    bench = Bench()
    bench.state = ExchangeState(100, lambda rid, ended: 1 // 0)
    bench.advertise()
    sink = Sink()
    bench.state.await_children("other", 1, 60.0, sink, 100.0)
    ended = RendezvousEvent(rendezvous_id="r")
    ended.child_ended.request_id = "a"
    bench.state.receive(ExchangeResponse(events=[ended, closed("other")]), 0.0)
    assert bench.state.open_awaits == 0
    assert bench.state.open_adverts == 0


def test_endless_lives_can_be_sent() -> None:
    bench = Bench()
    bench.state.await_children("w", 1, math.inf, Sink(), math.inf)
    bench.advertise(expires_s=math.inf)
    waiting, advert = bench.sent()
    assert waiting.await_children.ttl_ms == advert.advertise.ttl_ms == 2**32 - 1


def test_a_life_that_is_no_number_is_refused_at_once() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="ttl_s"):
        bench.state.await_children("w", 1, math.nan, Sink(), math.nan)
    with pytest.raises(ValueError, match="expires_s"):
        bench.advertise(expires_s=math.nan)
    assert bench.sent() == []
    assert (bench.state.open_awaits, bench.state.open_adverts) == (0, 0)


def test_refused_awaits_leave_no_deadlines_behind() -> None:
    bench = Bench()
    for number in range(5_000):
        bench.state.await_children(f"r{number}", 1, 600.0, Sink(), 605.0)
        bench.answer_all(3, "bad")
    assert bench.state.open_awaits == 0
    assert len(bench.state._await_deadlines) < 3_000


def test_the_end_of_a_child_is_sent_whatever_its_reason_holds() -> None:
    bench = Bench()
    for operation in (
        Withdrawal("r", "a", OUTCOME_FAILED, "no file \udcff" + "x" * 5_000_000),
        Cancellation("r", "\ud800", OUTCOME_ABORTED),
        FailureReport("r", "\ud800"),
    ):
        bench.state.end(operation, 0.0, 10.0, bench.outcomes.append)
    withdrawn, cancelled, failed = bench.sent()
    assert withdrawn.withdraw.reason.startswith("no file ?x")
    assert len(withdrawn.withdraw.reason) < 5_000
    assert cancelled.cancel.reason == failed.report_failure.reason == "?"
    assert bench.outcomes == []


@pytest.mark.parametrize("refusal", ["full", "draining", "silence"])
def test_an_advert_that_is_not_taken_again_ends_with_its_life(refusal: str) -> None:
    bench = Bench()
    bench.advertise(expires_s=100.0)
    bench.answer_all()
    bench.state.reconnected(40.0)
    now_s = 40.0
    while now_s < 101.0:
        if refusal != "silence":
            bench.answer_all(8 if refusal == "full" else 14, "not now", now_s=now_s)
        now_s += 0.5
        bench.state.wake(now_s)
    ((rid, ended),) = bench.told
    assert (rid, ended.request_id, ended.outcome) == ("r", "a", OUTCOME_EXPIRED)
    assert (bench.state.open_adverts, len(bench.state.pending), bench.sent()) == (0, 0, [])


def test_closing_the_client_ends_no_advert() -> None:
    bench = Bench()
    bench.advertise()
    bench.answer_all()
    bench.state.reconnected(1.0)
    bench.state.fail_all(MetaUnavailableError(grpc.StatusCode.CANCELLED, "closed"))
    assert bench.told == []  # it lives on at the service until its time limit
