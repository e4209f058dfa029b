"""Operations of an Exchange stream that wait to be sent or answered. Pure: time comes in."""

from __future__ import annotations

import heapq
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import grpc

from rd2h_client.errors import MetaError, MetaExhaustedError, MetaUnavailableError, QueueFullError, make_error
from rd2h_client.v1.rendezvous_pb2 import ExchangeRequest, Operation, OperationResult

logger = logging.getLogger("rd2h.client")

MAX_BATCH_OPERATIONS = 2_000
"""Operations in one message."""

MAX_BATCH_BYTES = 1024 * 1024
"""Size at which a message is closed; the service takes 4 MiB."""

MAX_OPERATION_BYTES = 5 * 512 * 1024
"""Size of one operation. The largest that the service takes, a report of 4,096 children, has 2.1 MiB."""

NO_DEADLINE = float("inf")

_RETRY_DELAY_S = 0.2
"""Delay before an operation is sent again that the service refused for now without saying for how long."""

_INVALID_ARGUMENT = 3
"""The number of that google.rpc.Code."""

_SLACK = 1_024
"""Ids, delays and deadlines of operations that are over, tolerated before they are thrown out, beyond the number that
wait."""

Done = Callable[[MetaError | None], None]
"""Called once with the outcome of an operation: None when the service applied it."""


class PendingOperation(ABC):
    """One operation, from its submission until the service has answered or its deadline has passed.

    Made for every child of every request, so it is its own entry in the queue, and its message is written when it is
    sent.
    """

    __slots__ = ("deadline_s", "op_id", "relaxed")

    name: ClassVar[str]
    """As in Operation."""
    may_be_large: ClassVar[bool] = False
    """Measured before it is sent. The others stay below 1 KiB, and measuring would cost as much as writing them: that
    is done once a stream has been ended for too large a message."""

    def __init__(self, deadline_s: float, relaxed: bool) -> None:
        """`relaxed`: nobody waits for the news that it was applied."""
        self.deadline_s = deadline_s
        self.relaxed = relaxed
        self.op_id = 0
        """Under which it was submitted last."""

    @abstractmethod
    def write(self, operation: Operation, now_s: float) -> None:
        """Fill in the message that carries it, with the life that is left at `now_s`."""

    @abstractmethod
    def answered(self, error: MetaError | None) -> None:
        """The service has applied it (None), has refused it for good, or its deadline has passed."""


class PendingOperations:
    """Operations in the order they were submitted, each until its answer or its deadline."""

    def __init__(self, max_operations: int) -> None:
        self._max_operations = max_operations
        self._max_sent = max(2 * max_operations, MAX_BATCH_OPERATIONS)
        """Operations of a stream that the service has not counted, also those given up meanwhile. It counts at once."""
        self._waiting: dict[int, PendingOperation] = {}
        self._unsent: deque[int] = deque()
        self._sent: deque[int] = deque()
        """In the order sent on the present stream, and not yet counted as done by the service."""
        self._refused: set[int] = set()
        """Among those sent: what must not be taken for applied when it is counted."""
        self._done_count = 0
        """Operations of the present stream that the service has counted as done."""
        self._delayed: list[tuple[float, int]] = []
        self._deadlines: list[tuple[float, int]] = []
        self._last_op_id = 0
        self._measures_all = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, op_id: int) -> bool:
        return op_id in self._waiting

    @property
    def nothing_to_send(self) -> bool:
        """True when every operation is sent."""
        return not self._unsent

    def submit(self, operation: PendingOperation, again: bool = False) -> None:
        """Queue an operation under a new op_id. What is said `again` comes from memories with bounds of their own.

        Raises:
            QueueFullError: too many wait.
        """
        waiting = self._waiting
        if len(waiting) >= self._max_operations and not again:
            raise QueueFullError(f"{self._max_operations} operations wait for the meta service")
        op_id = operation.op_id = self._last_op_id = self._last_op_id + 1
        waiting[op_id] = operation
        self._unsent.append(op_id)
        if operation.deadline_s != NO_DEADLINE:
            heapq.heappush(self._deadlines, (operation.deadline_s, op_id))
            if len(self._deadlines) > 2 * len(waiting) + _SLACK:
                self._forget_old_deadlines()

    def drop(self, op_id: int) -> None:
        """Forget an operation without an outcome; its answer, if it comes, is ignored."""
        self._waiting.pop(op_id, None)
        self._forget_old_ids()

    def measure_all(self) -> None:
        """Measure every operation from now on: the service may have met a message that is too large for it."""
        self._measures_all = True

    def take_batch(self, now_s: float) -> ExchangeRequest | None:
        """Return all that is to be sent now, up to the size of a message; None when there is nothing."""
        request = ExchangeRequest()
        add = request.operations.add
        room = min(MAX_BATCH_OPERATIONS, self._max_sent - len(self._sent))
        size_bytes, relaxed = 0, True
        while self._unsent and room > 0 and size_bytes < MAX_BATCH_BYTES:
            op_id = self._unsent.popleft()
            operation = self._waiting.get(op_id)
            if operation is None:
                continue
            message = add()
            message.op_id = op_id
            try:
                operation.write(message, now_s)
                if operation.may_be_large or self._measures_all:
                    size_bytes += _measured(message)
            except (TypeError, ValueError, OverflowError) as error:
                # Sent again it would break every stream; so it fails alone.
                del request.operations[-1], self._waiting[op_id]
                operation.answered(make_error(_INVALID_ARGUMENT, f"{operation.name}: cannot be sent: {error}"))
                continue
            self._sent.append(op_id)
            relaxed = relaxed and operation.relaxed
            room -= 1
        if not request.operations:
            return None
        request.relaxed = relaxed
        return request

    def refused(self, result: OperationResult, now_s: float) -> None:
        """Take over a refusal. Refusals for now are tried again until the operation's deadline."""
        op_id = result.op_id
        operation = self._waiting.get(op_id)
        if operation is None or op_id in self._refused:
            return
        retry_after_s = result.retry_after_ms / 1000 if result.retry_after_ms else None
        error = make_error(result.code, result.message, retry_after_s, result.outcome)
        due_s = now_s + (retry_after_s or _RETRY_DELAY_S)
        if isinstance(error, MetaUnavailableError | MetaExhaustedError) and due_s < operation.deadline_s:
            self._refused.add(op_id)
            heapq.heappush(self._delayed, (due_s, op_id))
            return
        del self._waiting[op_id]
        operation.answered(error)

    def done(self, count: int) -> None:
        """The service has applied or refused the first `count` operations of this stream."""
        sent, refused, waiting = self._sent, self._refused, self._waiting
        while self._done_count < count and sent:
            self._done_count += 1
            op_id = sent.popleft()
            if op_id in refused:
                refused.remove(op_id)
            elif (operation := waiting.pop(op_id, None)) is not None:
                operation.answered(None)

    def restart(self) -> list[int]:
        """A new stream starts: return the ids of what has no answer, in order, for `send_again`."""
        self._unsent.clear()
        self._sent.clear()
        self._refused.clear()
        self._done_count = 0
        self._delayed.clear()
        return list(self._waiting)

    def send_again(self, op_ids: list[int]) -> None:
        """Queue operations that still wait for their answer."""
        self._unsent.extend(op_id for op_id in op_ids if op_id in self._waiting)

    def next_wake_s(self) -> float:
        """Return when `wake` may have something to do at the earliest; infinity when never."""
        due_s = self._deadlines[0][0] if self._deadlines else NO_DEADLINE
        return min(due_s, self._delayed[0][0]) if self._delayed else due_s

    def wake(self, now_s: float) -> None:
        """Send again what was delayed until now, and give up what has waited too long."""
        while self._delayed and self._delayed[0][0] <= now_s:
            # Under a new id: the old one may still be counted as done, which then means nothing.
            _, old_op_id = heapq.heappop(self._delayed)
            self._refused.discard(old_op_id)
            delayed = self._waiting.pop(old_op_id, None)
            if delayed is not None:
                self.submit(delayed, again=True)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            operation = self._waiting.pop(heapq.heappop(self._deadlines)[1], None)
            if operation is not None:  # else it was answered in time
                message = f"{operation.name}: no answer from the meta service before the deadline"
                operation.answered(MetaUnavailableError(grpc.StatusCode.DEADLINE_EXCEEDED, message))
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heapq.heappop(self._deadlines)
        self._forget_old_ids()

    def fail_all(self, error: MetaError) -> None:
        """End everything that waits."""
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        self._delayed.clear()
        self._deadlines.clear()
        for operation in waiting.values():
            try:
                operation.answered(error)
            except Exception:  # a caller's callback; the others must be told all the same
                logger.exception("%s: whoever waits for it could not be told that it has failed", operation.name)

    def _forget_old_ids(self) -> None:
        waiting = self._waiting
        tolerated = 2 * len(waiting) + _SLACK
        if len(self._unsent) > tolerated:
            self._unsent = deque(op_id for op_id in self._unsent if op_id in waiting)
        if len(self._delayed) > tolerated:
            self._refused.difference_update([op_id for _, op_id in self._delayed if op_id not in waiting])
            self._delayed = [entry for entry in self._delayed if entry[1] in waiting]
            heapq.heapify(self._delayed)

    def _forget_old_deadlines(self) -> None:
        self._deadlines = [
            (operation.deadline_s, op_id)
            for op_id, operation in self._waiting.items()
            if operation.deadline_s != NO_DEADLINE
        ]
        heapq.heapify(self._deadlines)


def _measured(message: Operation) -> int:
    size_bytes = message.ByteSize()
    if size_bytes > MAX_OPERATION_BYTES:
        raise ValueError(f"it has {size_bytes} bytes, allowed are {MAX_OPERATION_BYTES}")
    return size_bytes
