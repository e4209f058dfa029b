"""What a client says on its Exchange stream: one class for each kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from rd2h_client.errors import MetaError
from rd2h_client.pending import NO_DEADLINE, Done, PendingOperation
from rd2h_client.v1.rendezvous_pb2 import Child, Operation, Outcome, RendezvousEvent

_LONGEST_MS = 2**32 - 1
_LONGEST_S = _LONGEST_MS / 1000
"""Longest life that can be said; the service takes less."""

_MAX_REASON = 1_024
"""Characters of a reason that are sent; the service keeps as many bytes."""


class AwaitSink(Protocol):
    """Takes the events of one awaited rendezvous."""

    def offer(self, event: RendezvousEvent) -> bool:
        """Take an event; return True when nothing follows."""

    def fail(self, error: MetaError) -> None:
        """The await was refused for good."""


class Await(PendingOperation):
    """A rendezvous whose children are awaited, kept up."""

    __slots__ = ("_on_refusal", "expected_children", "expires_s", "rendezvous_id", "sink", "ttl_s")
    name = "await_children"

    def __init__(
        self,
        rendezvous_id: str,
        expected_children: int,
        ttl_s: float,
        sink: AwaitSink,
        expires_s: float,
        on_refusal: Callable[[Await, MetaError], None],
    ) -> None:
        """It has a time limit of its own, `expires_s`, and so no deadline."""
        super().__init__(NO_DEADLINE, relaxed=True)
        self.rendezvous_id = rendezvous_id
        self.expected_children = expected_children
        self.ttl_s = ttl_s
        self.sink = sink
        self.expires_s = expires_s
        self._on_refusal = on_refusal

    def write(self, operation: Operation, now_s: float) -> None:
        """See PendingOperation."""
        ttl_s = min(self.ttl_s, self.expires_s - now_s)
        _write_await(operation, self.rendezvous_id, self.expected_children, ttl_s)

    def answered(self, error: MetaError | None) -> None:
        """See PendingOperation."""
        if error is not None:
            self._on_refusal(self, error)


class AwaitCheck(PendingOperation):
    """The await of a rendezvous that is awaited already, once more and with a deadline: it changes nothing, and brings
    to light whether the service has taken the await."""

    __slots__ = ("done", "expected_children", "rendezvous_id", "ttl_s")
    name = "await_children"

    def __init__(self, rendezvous_id: str, expected_children: int, ttl_s: float, deadline_s: float, done: Done) -> None:
        super().__init__(deadline_s, relaxed=False)
        self.rendezvous_id = rendezvous_id
        self.expected_children = expected_children
        self.ttl_s = ttl_s
        self.done = done

    def write(self, operation: Operation, now_s: float) -> None:
        """See PendingOperation."""
        _write_await(operation, self.rendezvous_id, self.expected_children, self.ttl_s)

    def answered(self, error: MetaError | None) -> None:
        """See PendingOperation."""
        self.done(error)


class Advert(PendingOperation):
    """A child that is advertised, kept up."""

    __slots__ = ("_on_answer", "child", "done", "expires_s", "key")
    name = "advertise"

    def __init__(
        self,
        key: tuple[str, str],
        child: Child,
        expires_s: float,
        deadline_s: float,
        relaxed: bool,
        done: Done,
        on_answer: Callable[[Advert, MetaError | None], None],
    ) -> None:
        """`key` is the rendezvous id and the request id. The child is kept, and must not be changed by its owner."""
        super().__init__(deadline_s, relaxed)
        self.key = key
        self.child = child
        self.expires_s = expires_s
        self.done: Done | None = done
        """None after the first answer."""
        self._on_answer = on_answer

    def write(self, operation: Operation, now_s: float) -> None:
        """See PendingOperation."""
        request = operation.advertise
        request.rendezvous_id = self.key[0]
        request.ttl_ms = _milliseconds(self.expires_s - now_s)
        request.child.CopyFrom(self.child)

    def answered(self, error: MetaError | None) -> None:
        """See PendingOperation."""
        self._on_answer(self, error)


class End(PendingOperation):
    """An operation that ends a child or a whole rendezvous."""

    __slots__ = ("done", "reason", "remember", "rendezvous_id", "said_s")

    def __init__(self, rendezvous_id: str, reason: str, relaxed: bool) -> None:
        """The rest is filled in by `ExchangeState.end`."""
        super().__init__(NO_DEADLINE, relaxed)
        self.rendezvous_id = rendezvous_id
        self.reason = reason if reason.isascii() and len(reason) <= _MAX_REASON else _sendable(reason)
        self.said_s = 0.0
        """When it was said first."""
        self.done: Done = ignore
        self.remember: Callable[[End], object] = _forget
        """Called when the service has applied it."""

    def answered(self, error: MetaError | None) -> None:
        """See PendingOperation."""
        if error is None:
            self.remember(self)
        self.done(error)


class Withdrawal(End):
    """Decode takes back a child, advertised or not."""

    __slots__ = ("choice_index", "outcome", "prompt_index", "request_id")
    name = "withdraw"

    def __init__(
        self,
        rendezvous_id: str,
        request_id: str,
        outcome: Outcome,
        reason: str = "",
        prompt_index: int = 0,
        choice_index: int = 0,
        relaxed: bool = False,
    ) -> None:
        super().__init__(rendezvous_id, reason, relaxed)
        self.request_id = request_id
        self.outcome = outcome
        self.prompt_index = prompt_index
        self.choice_index = choice_index

    def write(self, operation: Operation, now_s: float) -> None:
        """See PendingOperation."""
        request = operation.withdraw
        request.rendezvous_id = self.rendezvous_id
        request.request_id = self.request_id
        request.outcome = self.outcome
        request.reason = self.reason
        request.prompt_index = self.prompt_index
        request.choice_index = self.choice_index


class Cancellation(End):
    """A whole rendezvous is over."""

    __slots__ = ("outcome",)
    name = "cancel"

    def __init__(self, rendezvous_id: str, reason: str, outcome: Outcome, relaxed: bool = False) -> None:
        super().__init__(rendezvous_id, reason, relaxed)
        self.outcome = outcome

    def write(self, operation: Operation, now_s: float) -> None:
        """See PendingOperation."""
        request = operation.cancel
        request.rendezvous_id = self.rendezvous_id
        request.reason = self.reason
        request.outcome = self.outcome


class FailureReport(End):
    """Children (all, when none is named) will get no KV."""

    __slots__ = ("request_ids",)
    name = "report_failure"
    may_be_large = True

    def __init__(self, rendezvous_id: str, reason: str, request_ids: Iterable[str] = (), relaxed: bool = False) -> None:
        super().__init__(rendezvous_id, reason, relaxed)
        self.request_ids = tuple(request_ids)

    def write(self, operation: Operation, now_s: float) -> None:
        """See PendingOperation."""
        request = operation.report_failure
        request.rendezvous_id = self.rendezvous_id
        request.reason = self.reason
        request.request_ids.extend(self.request_ids)


def ignore(error: MetaError | None) -> None:
    """For operations whose outcome nobody waits for."""


def _forget(end: End) -> None:
    """An end that need not be said again."""


def _write_await(operation: Operation, rendezvous_id: str, expected_children: int, ttl_s: float) -> None:
    request = operation.await_children
    request.rendezvous_id = rendezvous_id
    request.expected_children = expected_children
    request.ttl_ms = _milliseconds(ttl_s)
    request.children_only = True


def _milliseconds(seconds: float) -> int:
    if 0.001 <= seconds <= _LONGEST_S:
        return int(seconds * 1000 + 0.5)
    return _LONGEST_MS if seconds > _LONGEST_S else 1


def _sendable(reason: str) -> str:
    """A reason that can be encoded and is no longer than the service keeps: the end itself matters more."""
    return reason[:_MAX_REASON].encode(errors="replace").decode()
