"""What a client has said on its Exchange stream, and must say again after a reconnect or a service restart.

Pure: no gRPC call, no event loop; time comes in. The stream's driver asks it what to send and tells it what came.
"""

from __future__ import annotations

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
    AwaitRequest,
    Child,
    ChildEnded,
    ExchangeRequest,
    ExchangeResponse,
    Operation,
    Outcome,
    RendezvousEvent,
)

_REPEAT_S = 60.0
"""Ends (cancel, withdraw, failure) of this last while are said again after a reconnect: a restarted service has
forgotten them, and a late advert must still learn of them."""

_MAX_REPEATED = 8_192

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
    request: AwaitRequest
    sink: AwaitSink
    expires_s: float
    op_id: int = 0


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
        self, rendezvous_id: str, child: Child, now_s: float, expires_s: float, deadline_s: float, done: Done
    ) -> None:
        """Advertise a child and keep the advert up until it is withdrawn, has ended, or `expires_s`.

        Raises:
            QueueFullError: too many are open.
        """
        key = (rendezvous_id, child.request_id)
        if key not in self._adverts and len(self._adverts) >= self._max_open:
            raise QueueFullError(f"{self._max_open} adverts are open")
        operation = Operation()
        request = operation.advertise  # filled in place: a child is copied once on its way
        request.rendezvous_id = rendezvous_id
        request.ttl_ms = max(1, round((expires_s - now_s) * 1000))
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

    def await_children(self, request: AwaitRequest, sink: AwaitSink, expires_s: float) -> None:
        """Await a rendezvous and keep that up until it is over, refused, `expires_s`, or `forget_await`.

        Raises:
            QueueFullError: too many are open.
            ValueError: this client awaits it already.
        """
        if request.rendezvous_id in self._awaits:
            raise ValueError(f"rendezvous_id: {request.rendezvous_id!r} is awaited already by this client")
        if len(self._awaits) >= self._max_open:
            raise QueueFullError(f"{self._max_open} awaits are open")
        waiting = _OpenAwait(request, sink, expires_s)
        self._send_await(waiting)
        self._awaits[request.rendezvous_id] = waiting

    def forget_await(self, rendezvous_id: str) -> None:
        """Stop awaiting."""
        waiting = self._awaits.pop(rendezvous_id, None)
        if waiting is not None:
            self.pending.drop(waiting.op_id)

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
        for waiting in list(self._awaits.values()):
            waiting.sink.resume()
            if waiting.op_id not in waiting_for_result:
                self._await_again(waiting, now_s)
        for key, advert in list(self._adverts.items()):
            if advert.op_id not in waiting_for_result:
                self._advertise_again(key, advert, now_s)
        for said_s, operation in [self._ends.popleft() for _ in range(len(self._ends))]:
            if said_s + _REPEAT_S > now_s:
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
            self._receive_event(event)

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

    def _send_await(self, waiting: _OpenAwait, again: bool = False) -> None:
        rendezvous_id = waiting.request.rendezvous_id

        def answered(error: MetaError | None) -> None:
            if error is not None and self._awaits.get(rendezvous_id) is waiting:
                del self._awaits[rendezvous_id]
                waiting.sink.fail(error)

        # The caller's own time limit ends it: `forget_await`.
        operation = Operation(await_children=waiting.request)
        waiting.op_id = self.pending.submit(operation, NO_DEADLINE, answered, again)

    def _await_again(self, waiting: _OpenAwait, now_s: float) -> None:
        left_s = waiting.expires_s - now_s
        if left_s <= 0:
            self.forget_await(waiting.request.rendezvous_id)
            message = "await_children: its time limit passed while the meta service was away"
            waiting.sink.fail(MetaUnavailableError(grpc.StatusCode.DEADLINE_EXCEEDED, message))
            return
        waiting.request.ttl_ms = max(1, min(waiting.request.ttl_ms, round(left_s * 1000)))
        self._send_await(waiting, again=True)

    def _advertise_again(self, key: tuple[str, str], advert: _OpenAdvert, now_s: float) -> None:
        left_s = advert.expires_s - now_s
        if left_s <= 0:
            self._child_ended(key, OUTCOME_EXPIRED, "its time limit passed while the meta service was away")
            return
        advert.request.ttl_ms = max(1, round(left_s * 1000))

        def answered(error: MetaError | None) -> None:
            if error is None or self._adverts.get(key) is not advert or isinstance(error, MetaUnavailableError):
                return
            outcome = error.outcome if isinstance(error, RendezvousEndedError) else OUTCOME_FAILED
            self._child_ended(key, outcome, error.message)

        advert.op_id = self.pending.submit(Operation(advertise=advert.request), NO_DEADLINE, answered, again=True)

    def _receive_event(self, event: RendezvousEvent) -> None:
        rendezvous_id = event.rendezvous_id
        if event.HasField("child_ended") and self._forget_advert(rendezvous_id, event.child_ended):
            self._on_child_ended(rendezvous_id, event.child_ended)
        waiting = self._awaits.get(rendezvous_id)
        if waiting is not None and waiting.sink.offer(event):
            self.forget_await(rendezvous_id)

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
