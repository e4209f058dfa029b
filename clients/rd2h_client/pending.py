"""Operations of an Exchange stream that wait to be sent or answered. Pure: time comes in."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from rd2h_client.errors import MetaError, MetaExhaustedError, MetaUnavailableError, QueueFullError, make_error
from rd2h_client.v1.rendezvous_pb2 import ExchangeRequest, Operation, OperationResult

MAX_BATCH_OPERATIONS = 2_000
"""Operations in one message. Most stay below 1 KiB."""

MAX_BATCH_BYTES = 2 * 1024 * 1024
"""Size at which a message is closed; the service takes 4 MiB."""

NO_DEADLINE = float("inf")

_RETRY_DELAY_S = 0.2
"""Delay before an operation is sent again that the service refused for now without saying for how long."""

_SLACK = 64

Done = Callable[[MetaError | None], None]
"""Called once with the outcome of an operation: None when the service applied it."""


@dataclass(slots=True)
class _Entry:
    operation: Operation
    deadline_s: float
    done: Done


class PendingOperations:
    """Operations in the order they were submitted, each until its result or its deadline."""

    def __init__(self, max_operations: int) -> None:
        self._max_operations = max_operations
        self._entries: dict[int, _Entry] = {}
        self._unsent: deque[int] = deque()
        self._delayed: list[tuple[float, int]] = []
        self._deadlines: list[tuple[float, int]] = []
        self._last_op_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, op_id: int) -> bool:
        return op_id in self._entries

    @property
    def nothing_to_send(self) -> bool:
        """True when every operation is sent."""
        return not self._unsent

    def submit(self, operation: Operation, deadline_s: float, done: Done, again: bool = False) -> int:
        """Queue an operation; return its op_id. What is said `again` comes from memories with bounds of their own.

        Raises:
            QueueFullError: too many wait.
        """
        if len(self._entries) >= self._max_operations and not again:
            raise QueueFullError(f"{self._max_operations} operations wait for the meta service")
        self._last_op_id += 1
        op_id = operation.op_id = self._last_op_id
        self._entries[op_id] = _Entry(operation, deadline_s, done)
        self._unsent.append(op_id)
        if deadline_s != NO_DEADLINE:
            heapq.heappush(self._deadlines, (deadline_s, op_id))
            if len(self._deadlines) > 2 * len(self._entries) + _SLACK:
                self._forget_old_deadlines()
        return op_id

    def drop(self, op_id: int) -> None:
        """Forget an operation without an outcome; its result, if it comes, is ignored."""
        self._entries.pop(op_id, None)

    def take_batch(self) -> ExchangeRequest | None:
        """Return all that is to be sent now, up to the size of a message; None when there is nothing."""
        operations: list[Operation] = []
        size_bytes = 0
        while self._unsent and len(operations) < MAX_BATCH_OPERATIONS and size_bytes < MAX_BATCH_BYTES:
            entry = self._entries.get(self._unsent.popleft())
            if entry is not None:
                operations.append(entry.operation)
                # Only lists of request ids make an operation large; measuring each would cost more than sending it.
                if entry.operation.HasField("report_failure"):
                    size_bytes += entry.operation.ByteSize()
        if not operations:
            return None
        request = ExchangeRequest()
        request.operations.extend(operations)
        return request

    def receive(self, result: OperationResult, now_s: float) -> None:
        """Take over a refusal. Refusals for now are tried again until the operation's deadline."""
        entry = self._entries.get(result.op_id)
        if entry is None:
            return
        retry_after_s = result.retry_after_ms / 1000 if result.retry_after_ms else None
        error = make_error(result.code, result.message, retry_after_s, result.outcome)
        due_s = now_s + (retry_after_s or _RETRY_DELAY_S)
        if isinstance(error, MetaUnavailableError | MetaExhaustedError) and due_s < entry.deadline_s:
            heapq.heappush(self._delayed, (due_s, result.op_id))
            return
        del self._entries[result.op_id]
        entry.done(error)

    def succeed(self, op_ids: Iterable[int]) -> None:
        """These operations were applied."""
        for op_id in op_ids:
            entry = self._entries.pop(op_id, None)
            if entry is not None:
                entry.done(None)

    def restart(self) -> list[int]:
        """A new stream starts: return the ids of what has no result, in order, for `send_again`."""
        self._unsent.clear()
        self._delayed.clear()
        return list(self._entries)

    def send_again(self, op_ids: list[int]) -> None:
        """Queue operations that still wait for their result."""
        self._unsent.extend(op_id for op_id in op_ids if op_id in self._entries)

    def next_wake_s(self) -> float:
        """Return when `wake` may have something to do at the earliest; infinity when never."""
        due_s = self._deadlines[0][0] if self._deadlines else NO_DEADLINE
        return min(due_s, self._delayed[0][0]) if self._delayed else due_s

    def wake(self, now_s: float) -> None:
        """Send again what was delayed until now, and give up what has waited too long."""
        while self._delayed and self._delayed[0][0] <= now_s:
            self._unsent.append(heapq.heappop(self._delayed)[1])
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = self._entries.pop(heapq.heappop(self._deadlines)[1], None)
            if entry is not None:  # else it was answered in time
                kind = entry.operation.WhichOneof("op")
                message = f"{kind}: no answer from the meta service before the deadline"
                entry.done(MetaUnavailableError(grpc.StatusCode.DEADLINE_EXCEEDED, message))
        while self._deadlines and self._deadlines[0][1] not in self._entries:
            heapq.heappop(self._deadlines)

    def fail_all(self, error: MetaError) -> None:
        """End everything that waits."""
        entries, self._entries = self._entries, {}
        self._unsent.clear()
        self._delayed.clear()
        self._deadlines.clear()
        for entry in entries.values():
            entry.done(error)

    def _forget_old_deadlines(self) -> None:
        self._deadlines = [
            (entry.deadline_s, op_id) for op_id, entry in self._entries.items() if entry.deadline_s != NO_DEADLINE
        ]
        heapq.heapify(self._deadlines)
