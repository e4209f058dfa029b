"""Operations that wait: order, batches, retries, deadlines, bounds."""

import grpc
import pytest
from rd2h_client.errors import MetaError, MetaExhaustedError, MetaRefusedError, MetaUnavailableError, QueueFullError
from rd2h_client.operations import Cancellation, End, FailureReport
from rd2h_client.pending import MAX_BATCH_BYTES, MAX_BATCH_OPERATIONS, NO_DEADLINE, PendingOperations
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_ABORTED, OperationResult


class Bench:
    def __init__(self, size: int = 100_000) -> None:
        self.pending = PendingOperations(size)
        self.outcomes: list[MetaError | None] = []

    def submit(self, deadline_s: float = 10.0, operation: End | None = None) -> int:
        operation = operation or Cancellation("r", "left", OUTCOME_ABORTED)
        operation.deadline_s = deadline_s
        operation.done = self.outcomes.append
        self.pending.submit(operation)
        return operation.op_id

    def sent(self) -> list[int]:
        batch = self.pending.take_batch(0.0)
        return [operation.op_id for operation in batch.operations] if batch else []

    def kept_ids(self) -> int:
        pending = self.pending
        queues = (pending._unsent, pending._sent, pending._refused, pending._delayed, pending._deadlines)
        return sum(len(queue) for queue in queues)

    def refuse(self, op_id: int, code: int, message: str = "", retry_after_ms: int = 0) -> None:
        result = OperationResult(op_id=op_id, code=code, message=message, retry_after_ms=retry_after_ms)
        self.pending.refused(result, 0.0)


def test_everything_pending_goes_into_one_message_in_order() -> None:
    bench = Bench()
    ids = [bench.submit() for _ in range(5)]
    assert bench.sent() == ids
    assert bench.sent() == []
    assert bench.pending.nothing_to_send


def test_batches_are_bounded_in_number_and_size() -> None:
    bench = Bench()
    for _ in range(MAX_BATCH_OPERATIONS + 1):
        bench.submit()
    assert len(bench.sent()) == MAX_BATCH_OPERATIONS
    assert len(bench.sent()) == 1
    for _ in range(10):
        bench.submit(operation=FailureReport("r", "x", ["y" * 500] * 1_000))
    sizes = []
    while batch := bench.pending.take_batch(0.0):
        sizes.append(len(batch.operations))
        assert batch.ByteSize() < MAX_BATCH_BYTES + 600_000
    assert sizes == [3, 3, 3, 1]


def test_results_end_operations_once() -> None:
    bench = Bench()
    bench.submit()
    second = bench.submit()
    bench.submit()
    bench.sent()
    for _ in range(2):
        bench.refuse(second, 3, "bad")
        bench.refuse(99, 3)
        bench.pending.done(2)
    refusal, applied = bench.outcomes
    assert isinstance(refusal, MetaRefusedError)
    assert applied is None
    bench.pending.done(1_000_000)  # more than were sent
    assert bench.outcomes[2:] == [None]


def test_what_is_counted_as_done_is_what_was_sent_on_this_stream() -> None:
    bench = Bench()
    bench.submit()
    bench.pending.done(1)  # nothing was sent yet
    bench.sent()
    bench.pending.done(1)
    assert bench.outcomes == [None]
    bench.submit()
    bench.sent()
    bench.pending.send_again(bench.pending.restart())
    bench.pending.done(1)
    assert len(bench.outcomes) == 1
    bench.sent()
    bench.pending.done(1)
    assert bench.outcomes == [None, None]


def test_what_cannot_be_sent_fails_alone() -> None:
    bench = Bench()
    bench.submit(operation=Cancellation("\ud800", "left", OUTCOME_ABORTED))
    good = bench.submit()
    assert bench.sent() == [good]
    (error,) = bench.outcomes
    assert isinstance(error, MetaRefusedError)
    assert "cancel: cannot be sent" in error.message
    bench.pending.done(1)
    assert bench.outcomes[1:] == [None]
    assert len(bench.pending) == 0


@pytest.mark.parametrize(("code", "retry_after_ms", "due_s"), [(8, 1_500, 1.5), (14, 0, 0.2)])
def test_refusals_for_now_are_sent_again_after_the_delay(code: int, retry_after_ms: int, due_s: float) -> None:
    bench = Bench()
    op_id = bench.submit(deadline_s=10.0)
    bench.sent()
    bench.refuse(op_id, code, retry_after_ms=retry_after_ms)
    bench.pending.done(1)
    assert bench.outcomes == []
    assert bench.pending.next_wake_s() == due_s
    bench.pending.wake(due_s - 0.01)
    assert bench.sent() == []
    bench.pending.wake(due_s)
    (again,) = bench.sent()
    assert again != op_id  # ids are unique on a stream
    bench.pending.done(2)
    assert bench.outcomes == [None]


def test_a_retry_that_overtakes_the_count_of_its_refusal_is_not_taken_for_applied() -> None:
    bench = Bench()
    op_id = bench.submit()
    bench.sent()
    bench.refuse(op_id, 8)
    bench.pending.wake(1.0)
    (again,) = bench.sent()
    bench.refuse(again, 8)
    bench.pending.done(2)
    assert bench.outcomes == []
    assert len(bench.pending) == 1


def test_a_retry_that_would_come_after_the_deadline_is_not_waited_for() -> None:
    bench = Bench()
    op_id = bench.submit(deadline_s=1.0)
    bench.refuse(op_id, 8, "full", retry_after_ms=1_500)
    (error,) = bench.outcomes
    assert isinstance(error, MetaExhaustedError)
    assert error.retry_after_s == 1.5


def test_deadlines() -> None:
    bench = Bench()
    bench.submit(deadline_s=3.0)
    bench.sent()
    bench.submit(deadline_s=5.0)
    bench.submit(deadline_s=NO_DEADLINE)
    bench.pending.done(1)
    bench.pending.wake(4.9)
    assert bench.pending.next_wake_s() == 5.0
    assert len(bench.outcomes) == 1
    bench.pending.wake(5.0)
    error = bench.outcomes[1]
    assert isinstance(error, MetaUnavailableError)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert bench.pending.next_wake_s() == NO_DEADLINE
    assert len(bench.pending) == 1


def test_a_new_stream_sends_the_unanswered_again_in_order() -> None:
    bench = Bench()
    ids = [bench.submit() for _ in range(4)]
    bench.sent()
    bench.pending.done(1)
    bench.refuse(ids[2], 14)
    again = bench.pending.restart()
    newer = bench.submit()
    bench.pending.drop(ids[1])
    bench.pending.send_again(again)
    assert bench.sent() == [newer, ids[2], ids[3]]
    bench.pending.wake(1.0)
    assert bench.sent() == []


def test_the_queue_is_bounded() -> None:
    bench = Bench(size=2)
    bench.submit()
    bench.submit()
    with pytest.raises(QueueFullError, match="2 operations wait"):
        bench.submit()


def test_memory_of_deadlines_follows_what_waits() -> None:
    bench = Bench()
    keep = bench.submit(deadline_s=1.0)
    bench.sent()
    for _ in range(10_000):
        bench.pending.drop(bench.submit(deadline_s=1e6))
    assert len(bench.pending._deadlines) < 2_000
    assert len(bench.pending._unsent) < 2_000  # also while no stream takes anything
    assert keep in bench.pending


def test_fail_all() -> None:
    bench = Bench()
    for _ in range(3):
        bench.submit()
    error = MetaRefusedError(grpc.StatusCode.UNAUTHENTICATED, "no")
    bench.pending.fail_all(error)
    assert bench.outcomes == [error] * 3
    assert bench.sent() == []
    assert bench.pending.next_wake_s() == NO_DEADLINE


def test_what_expires_while_the_service_is_away_leaves_nothing_behind() -> None:
    bench = Bench()
    for number in range(20_000):
        bench.submit(deadline_s=number + 1.0)
        bench.pending.wake(number + 1.0)
    assert len(bench.outcomes) == 20_000
    assert bench.kept_ids() < 5_000


def test_a_service_that_counts_nothing_is_not_sent_more_and_more() -> None:
    bench = Bench(size=1_000)
    for number in range(20):
        for _ in range(1_000):
            bench.submit(deadline_s=number + 1.0)
        while bench.sent():
            pass
        bench.pending.wake(number + 1.0)
    assert len(bench.outcomes) == 20_000
    assert bench.kept_ids() < 10_000
    op_id = bench.submit(deadline_s=100.0)
    assert bench.sent() == []
    bench.pending.done(1_000)
    assert bench.sent() == [op_id]


def test_ids_that_are_over_are_not_kept_for_as_long_as_the_service_says() -> None:
    bench = Bench()
    for number in range(20_000):
        op_id = bench.submit(deadline_s=NO_DEADLINE)
        bench.sent()
        bench.refuse(op_id, 8, retry_after_ms=2**32 - 1)
        bench.pending.done(number + 1)
        bench.pending.drop(op_id)
    assert len(bench.pending) == 0
    assert bench.kept_ids() < 5_000


def test_a_refusal_of_what_was_not_sent_is_forgotten_with_its_delay() -> None:
    bench = Bench()
    for number in range(5_000):
        op_id = bench.submit(deadline_s=NO_DEADLINE)
        bench.refuse(op_id, 8)
        bench.pending.wake(1.0)
        assert len(bench.sent()) == 1
        bench.pending.done(number + 1)
    assert len(bench.outcomes) == 5_000
    assert bench.kept_ids() < 3_000


def test_what_is_larger_than_a_message_fails_alone() -> None:
    bench = Bench()
    huge = "x" * (5 * 1024 * 1024)
    bench.submit(operation=FailureReport("r", "x", [huge]))
    other = bench.submit(operation=Cancellation(huge, "left", OUTCOME_ABORTED))
    good = bench.submit()
    assert bench.sent() == [other, good]
    bench.pending.measure_all()  # the stream was ended for it
    bench.pending.send_again(bench.pending.restart())
    assert bench.sent() == [good]
    assert [error is not None and error.code for error in bench.outcomes] == [grpc.StatusCode.INVALID_ARGUMENT] * 2


def test_batches_are_measured_in_bytes() -> None:
    bench = Bench()
    bench.pending.measure_all()
    for _ in range(20):
        bench.submit(operation=FailureReport("r", "x", ["\u6f22" * 170] * 1_000))
    for _ in range(MAX_BATCH_OPERATIONS):
        bench.submit(operation=Cancellation("\u6f22" * 1_000, "left", OUTCOME_ABORTED))
    sent = 0
    while batch := bench.pending.take_batch(0.0):
        sent += len(batch.operations)
        assert batch.ByteSize() < 4 * 1024 * 1024
    assert sent == 20 + MAX_BATCH_OPERATIONS


def test_a_callback_that_raises_keeps_no_other_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()

    def raises(error: MetaError | None) -> None:
        raise LookupError("a defect of the caller")

    first = Cancellation("r", "left", OUTCOME_ABORTED)
    bench.submit(operation=first)
    first.done = raises
    bench.submit()
    bench.pending.fail_all(MetaUnavailableError(grpc.StatusCode.CANCELLED, "closed"))
    assert len(bench.outcomes) == 1
    assert len(bench.pending) == 0
    assert "a defect of the caller" in caplog.text
