"""What a client has said on its Exchange stream, and must say again after a reconnect or a service restart.

Pure: no gRPC call, no event loop; time comes in. The stream's driver asks it what to send and tells it what came.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from rd2h_client.errors import MetaError, MetaUnavailableError, QueueFullError, RendezvousEndedError
from rd2h_client.pending import NO_DEADLINE, Done, PendingOperations
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    AdvertiseRequest,
    Child,
    ChildEnded,
    ExchangeRequest,
    ExchangeResponse,
    Operation,
    Outcome,
    RendezvousEvent,
)

logger = logging.getLogger("rd2h.client")

_REPEAT_S = 60.0
"""Ends (cancel, withdraw, failure) of this last while are said again after a reconnect: a restarted service has
forgotten them, and a late advert must still learn of them."""

_MAX_REPEATED = 8_192
_SLACK = 64
"""Deadlines of awaits that are over, tolerated before they are thrown out, beyond the number of open ones."""

OnChildEnded = Callable[[str, ChildEnded], None]
"""Called with the rendezvous id and the end of a child that was advertised here."""


class AwaitSink(Protocol):
    """Takes the events of one awaited rendezvous."""

    def offer(self, event: RendezvousEvent) -> bool:
        """Take an event; return True when nothing follows."""

    def fail(self, error: MetaError) -> None:
        """The await was refused for good."""

    def resume(self) -> None:
        """The await is sent again: known events may come again."""


@dataclass(slots=True)
class _OpenAwait:
    operation: Operation
    sink: AwaitSink
    expires_s: float
    op_id: int = 0
    """Operation id under which it was sent last; its result may have come."""


@dataclass(slots=True)
class _OpenAdvert:
    request: AdvertiseRequest
    expires_s: float
    op_id: int = 0
    """Operation that carries it at present; its result may have come."""


class ExchangeState:
    """The memory of one client's Exchange stream. Each kind of entry is bounded by `max_open`."""

    def __init__(self, max_open: int, on_child_ended: OnChildEnded) -> None:
        """`on_child_ended` is told when a child advertised here ends otherwise than by withdrawal from here."""
        self._max_open = max_open
        self._on_child_ended = on_child_ended
        self.pending = PendingOperations(2 * max_open)
        self._awaits: dict[str, _OpenAwait] = {}
        self._await_deadlines: list[tuple[float, str]] = []
        self._adverts: dict[tuple[str, str], _OpenAdvert] = {}
        self._ends: deque[tuple[float, Operation]] = deque(maxlen=_MAX_REPEATED)
        self.service_id = ""
        """Run of the service that answered last; empty before the first answer."""

    @property
    def open_adverts(self) -> int:
        """Adverts that are kept up."""
        return len(self._adverts)

    @property
    def open_awaits(self) -> int:
        """Awaits that are kept up."""
        return len(self._awaits)

    def advertise(
        self,
        rendezvous_id: str,
        child: Child,
        now_s: float,
        expires_s: float,
        deadline_s: float,
        done: Done,
        relaxed: bool = False,
    ) -> None:
        """Advertise a child and keep the advert up until it is withdrawn, has ended, or `expires_s`. With `relaxed` the
        news of success may come a little later than possible.

        Raises:
            QueueFullError: too many are open.
        """
        key = (rendezvous_id, child.request_id)
        if key not in self._adverts and len(self._adverts) >= self._max_open:
            raise QueueFullError(f"{self._max_open} adverts are open")
        operation = Operation(relaxed=relaxed)
        request = operation.advertise  # filled in place: a child is copied once on its way
        request.rendezvous_id = rendezvous_id
        request.ttl_ms = _milliseconds(expires_s - now_s)
        request.child.CopyFrom(child)
        advert = _OpenAdvert(request, expires_s)

        def advertised(error: MetaError | None) -> None:
            if self._adverts.get(key) is not advert:
                error = None  # withdrawn meanwhile: how the advert fared no longer matters
            elif error is not None:
                del self._adverts[key]
            done(error)

        advert.op_id = self.pending.submit(operation, deadline_s, advertised)
        self._adverts[key] = advert

    def await_children(
        self, rendezvous_id: str, expected_children: int, ttl_s: float, sink: AwaitSink, expires_s: float
    ) -> None:
        """Await a rendezvous and keep that up until it is over, refused, `expires_s`, or `forget_await`.

        Raises:
            QueueFullError: too many are open.
            ValueError: this client awaits it already.
        """
        if rendezvous_id in self._awaits:
            raise ValueError(f"rendezvous_id: {rendezvous_id!r} is awaited already by this client")
        if len(self._awaits) >= self._max_open:
            raise QueueFullError(f"{self._max_open} awaits are open")
        operation = Operation(relaxed=True)
        request = operation.await_children
        request.rendezvous_id = rendezvous_id
        request.expected_children = expected_children
        request.ttl_ms = _milliseconds(ttl_s)
        waiting = _OpenAwait(operation, sink, expires_s)
        self._send_await(rendezvous_id, waiting)
        self._awaits[rendezvous_id] = waiting
        heapq.heappush(self._await_deadlines, (expires_s, rendezvous_id))

    def forget_await(self, rendezvous_id: str) -> None:
        """Stop awaiting."""
        waiting = self._awaits.pop(rendezvous_id, None)
        if waiting is not None:
            self.pending.drop(waiting.op_id)
            if len(self._await_deadlines) > 2 * len(self._awaits) + _SLACK:
                self._await_deadlines = [(entry.expires_s, name) for name, entry in self._awaits.items()]
                heapq.heapify(self._await_deadlines)

    def end(self, operation: Operation, now_s: float, deadline_s: float, done: Done) -> None:
        """Send a cancel, withdraw or report_failure. A withdrawn advert is no longer kept up."""
        if operation.WhichOneof("op") == "withdraw":
            self._adverts.pop((operation.withdraw.rendezvous_id, operation.withdraw.request_id), None)
        self._send_end(operation, now_s, deadline_s, done)

    def take_batch(self) -> ExchangeRequest | None:
        """Return all that is to be sent now, up to the size of a message; None when there is nothing."""
        return self.pending.take_batch()

    def reconnected(self, now_s: float) -> None:
        """A new stream starts: what the service may not know is to be sent again, in an order that is safe."""
        unanswered = self.pending.restart()
        waiting_for_result = set(unanswered)
        for rendezvous_id, waiting in self._awaits.items():
            waiting.sink.resume()
            if waiting.op_id not in waiting_for_result:
                left_ms = _milliseconds(waiting.expires_s - now_s)
                request = waiting.operation.await_children
                request.ttl_ms = min(request.ttl_ms, left_ms)
                self._send_await(rendezvous_id, waiting, again=True)
        for key, advert in list(self._adverts.items()):
            if advert.op_id not in waiting_for_result:
                self._advertise_again(key, advert, now_s)
        for said_s, operation in [self._ends.popleft() for _ in range(len(self._ends))]:
            if said_s + _REPEAT_S > now_s:
                operation.relaxed = True
                self._send_end(operation, said_s, said_s + _REPEAT_S, _ignore, again=True)
        # What has no answer comes last, so that an end among it comes after the advert that it ends.
        self.pending.send_again(unanswered)

    def receive(self, response: ExchangeResponse, now_s: float) -> None:
        """Take over what the service says."""
        if response.service_id:
            self.service_id = response.service_id
        self.pending.succeed(response.succeeded)
        for result in response.results:
            self.pending.receive(result, now_s)
        for event in response.events:
            try:
                self._receive_event(event)
            except Exception as error:
                # A callback of the caller, or a value of a later version. The other events must not be lost with it.
                logger.exception("rendezvous %r: an event could not be taken", event.rendezvous_id)
                self._give_up_await(event.rendezvous_id, error)

    def next_wake_s(self) -> float:
        """Return when `wake` may have something to do at the earliest; infinity when never."""
        due_s = self.pending.next_wake_s()
        return min(due_s, self._await_deadlines[0][0]) if self._await_deadlines else due_s

    def wake(self, now_s: float) -> None:
        """Send again what was delayed until now, and give up what has waited too long."""
        self.pending.wake(now_s)
        while self._await_deadlines and self._await_deadlines[0][0] <= now_s:
            expires_s, rendezvous_id = heapq.heappop(self._await_deadlines)
            waiting = self._awaits.get(rendezvous_id)
            if waiting is not None and waiting.expires_s == expires_s:
                # Longer than the service keeps it, and it has not said that it is over.
                self.forget_await(rendezvous_id)
                message = f"rendezvous {rendezvous_id!r}: its time limit passed with the meta service out of reach"
                waiting.sink.fail(MetaUnavailableError(grpc.StatusCode.DEADLINE_EXCEEDED, message))

    def fail_all(self, error: MetaError) -> None:
        """The service refuses this client altogether (a wrong token, say): nothing pending can succeed."""
        for rendezvous_id, waiting in list(self._awaits.items()):
            self.forget_await(rendezvous_id)
            waiting.sink.fail(error)
        self.pending.fail_all(error)

    def _send_end(
        self, operation: Operation, said_s: float, deadline_s: float, done: Done, again: bool = False
    ) -> None:
        def ended(error: MetaError | None) -> None:
            if error is None:
                self._ends.append((said_s, operation))
            done(error)

        self.pending.submit(operation, deadline_s, ended, again)

    def _send_await(self, rendezvous_id: str, waiting: _OpenAwait, again: bool = False) -> None:
        def answered(error: MetaError | None) -> None:
            if error is not None and self._awaits.get(rendezvous_id) is waiting:
                del self._awaits[rendezvous_id]
                waiting.sink.fail(error)

        # It has a time limit of its own: `wake`.
        waiting.op_id = self.pending.submit(waiting.operation, NO_DEADLINE, answered, again)

    def _advertise_again(self, key: tuple[str, str], advert: _OpenAdvert, now_s: float) -> None:
        left_s = advert.expires_s - now_s
        if left_s <= 0:
            self._child_ended(key, OUTCOME_EXPIRED, "its time limit passed while the meta service was away")
            return
        advert.request.ttl_ms = _milliseconds(left_s)

        def answered(error: MetaError | None) -> None:
            if error is None or self._adverts.get(key) is not advert or isinstance(error, MetaUnavailableError):
                return
            outcome = error.outcome if isinstance(error, RendezvousEndedError) else OUTCOME_FAILED
            self._child_ended(key, outcome, error.message)

        operation = Operation(relaxed=True, advertise=advert.request)
        advert.op_id = self.pending.submit(operation, NO_DEADLINE, answered, again=True)

    def _receive_event(self, event: RendezvousEvent) -> None:
        rendezvous_id = event.rendezvous_id
        if event.HasField("child_ended") and self._forget_advert(rendezvous_id, event.child_ended):
            self._on_child_ended(rendezvous_id, event.child_ended)
        waiting = self._awaits.get(rendezvous_id)
        if waiting is not None and waiting.sink.offer(event):
            self.forget_await(rendezvous_id)

    def _give_up_await(self, rendezvous_id: str, error: Exception) -> None:
        waiting = self._awaits.get(rendezvous_id)
        if waiting is not None:
            self.forget_await(rendezvous_id)
            message = f"rendezvous {rendezvous_id!r}: an event could not be taken: {type(error).__name__}: {error}"
            waiting.sink.fail(MetaError(grpc.StatusCode.INTERNAL, message))

    def _forget_advert(self, rendezvous_id: str, ended: ChildEnded) -> bool:
        """Stop keeping up an advert; return False when it is not from here."""
        return self._adverts.pop((rendezvous_id, ended.request_id), None) is not None

    def _child_ended(self, key: tuple[str, str], outcome: Outcome, reason: str) -> None:
        child: Child = self._adverts.pop(key).request.child
        ended = ChildEnded(
            request_id=child.request_id,
            outcome=outcome,
            reason=reason,
            prompt_index=child.prompt_index,
            choice_index=child.choice_index,
        )
        self._on_child_ended(key[0], ended)


def _ignore(error: MetaError | None) -> None:
    """Said again for late joiners only; nobody waits for the result."""


def _milliseconds(seconds: float) -> int:
    milliseconds = int(seconds * 1000 + 0.5)
    return milliseconds if 1 <= milliseconds < 2**32 else min(max(1, milliseconds), 2**32 - 1)
