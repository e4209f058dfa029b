"""Operations that wait: order, batches, retries, deadlines, bounds."""

import grpc
import pytest
from rd2h_client.errors import MetaError, MetaExhaustedError, MetaRefusedError, MetaUnavailableError, QueueFullError
from rd2h_client.pending import MAX_BATCH_BYTES, MAX_BATCH_OPERATIONS, NO_DEADLINE, PendingOperations
from rd2h_client.v1.rendezvous_pb2 import CancelRequest, Operation, OperationResult, ReportFailureRequest


class Bench:
    def __init__(self, size: int = 100_000) -> None:
        self.pending = PendingOperations(size)
        self.outcomes: list[MetaError | None] = []

    def submit(self, deadline_s: float = 10.0, operation: Operation | None = None) -> int:
        operation = operation or Operation(cancel=CancelRequest(rendezvous_id="r"))
        return self.pending.submit(operation, deadline_s, self.outcomes.append)

    def sent(self) -> list[int]:
        batch = self.pending.take_batch()
        return [operation.op_id for operation in batch.operations] if batch else []


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
    big = ReportFailureRequest(rendezvous_id="r", reason="x", request_ids=["y" * 500] * 1_000)
    for _ in range(10):
        bench.submit(operation=Operation(report_failure=big))
    while batch := bench.pending.take_batch():
        assert batch.ByteSize() < MAX_BATCH_BYTES + big.ByteSize() + 100


def test_results_end_operations_once() -> None:
    bench = Bench()
    first, second = bench.submit(), bench.submit()
    for _ in range(2):
        bench.pending.succeed([first, 99])
        bench.pending.receive(OperationResult(op_id=second, code=3, message="bad"), 0.0)
        bench.pending.receive(OperationResult(op_id=99, code=3), 0.0)
    assert bench.outcomes[0] is None
    assert isinstance(bench.outcomes[1], MetaRefusedError)
    assert len(bench.outcomes) == 2


@pytest.mark.parametrize(("code", "retry_after_ms", "due_s"), [(8, 1_500, 1.5), (14, 0, 0.2)])
def test_refusals_for_now_are_sent_again_after_the_delay(code: int, retry_after_ms: int, due_s: float) -> None:
    bench = Bench()
    op_id = bench.submit(deadline_s=10.0)
    bench.sent()
    bench.pending.receive(OperationResult(op_id=op_id, code=code, retry_after_ms=retry_after_ms), 0.0)
    assert bench.pending.next_wake_s() == due_s
    bench.pending.wake(due_s - 0.01)
    assert bench.sent() == []
    bench.pending.wake(due_s)
    assert bench.sent() == [op_id]
    bench.pending.succeed([op_id])
    assert bench.outcomes == [None]


def test_a_retry_that_would_come_after_the_deadline_is_not_waited_for() -> None:
    bench = Bench()
    op_id = bench.submit(deadline_s=1.0)
    bench.pending.receive(OperationResult(op_id=op_id, code=8, message="full", retry_after_ms=1_500), 0.0)
    (error,) = bench.outcomes
    assert isinstance(error, MetaExhaustedError)
    assert error.retry_after_s == 1.5


def test_deadlines() -> None:
    bench = Bench()
    bench.submit(deadline_s=5.0)
    answered = bench.submit(deadline_s=3.0)
    bench.submit(deadline_s=NO_DEADLINE)
    bench.pending.succeed([answered])
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
    bench.pending.succeed([ids[1]])
    bench.pending.receive(OperationResult(op_id=ids[2], code=14), 0.0)
    again = bench.pending.restart()
    newer = bench.submit()
    bench.pending.drop(ids[0])
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
    for _ in range(10_000):
        bench.pending.succeed([bench.submit(deadline_s=1e6)])
    assert len(bench.pending._deadlines) < 200
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
