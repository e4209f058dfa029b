"""What a client has said on its Exchange stream, and must say again after a reconnect or a service restart.

Pure: no gRPC call, no event loop; time comes in. The stream's driver asks it what to send and tells it what came.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable

import grpc

from rd2h_client.errors import MetaError, MetaExhaustedError, MetaUnavailableError, QueueFullError, RendezvousEndedError
from rd2h_client.operations import Advert, Await, AwaitSink, End, Withdrawal, ignore
from rd2h_client.pending import Done, PendingOperations
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    Child,
    ChildEnded,
    ExchangeRequest,
    ExchangeResponse,
    Outcome,
    RendezvousEvent,
)

logger = logging.getLogger("rd2h.client")

_REPEAT_S = 60.0
"""Ends (cancel, withdraw, failure) of this last while are said again after a reconnect: a restarted service has
forgotten them, and a late advert must still learn of them."""

_MAX_REPEATED = 8_192
_SLACK = 1_024
"""Deadlines of awaits that are over, tolerated before they are thrown out, beyond the number of open ones."""

OnChildEnded = Callable[[str, ChildEnded], None]
"""Called with the rendezvous id and the end of a child that was advertised here."""


class ExchangeState:
    """The memory of one client's Exchange stream. Each kind of entry is bounded by `max_open`."""

    def __init__(self, max_open: int, on_child_ended: OnChildEnded) -> None:
        """`on_child_ended` is told when a child advertised here ends otherwise than by withdrawal from here."""
        self._max_open = max_open
        self._on_child_ended = on_child_ended
        self.pending = PendingOperations(2 * max_open)
        self._awaits: dict[str, Await] = {}
        self._await_deadlines: list[tuple[float, str]] = []
        self._adverts: dict[tuple[str, str], Advert] = {}
        self._ends: deque[End] = deque(maxlen=_MAX_REPEATED)
        # Bound once: they go into every operation.
        self._remember_end = self._ends.append
        self._on_await_refusal = self._await_refused
        self._on_advert_answer = self._advert_answered
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
        expires_s: float,
        deadline_s: float,
        done: Done,
        relaxed: bool = False,
    ) -> None:
        """Advertise a child and keep the advert up until it is withdrawn, has ended, or `expires_s`. The child is kept,
        and must not be changed by its owner. With `relaxed` the news of success may come a little later than possible.

        Raises:
            QueueFullError: too many are open.
            ValueError: `expires_s` is not a number.
        """
        if expires_s != expires_s:  # the timer would never come to rest with NaN
            raise ValueError(f"expires_s: got {expires_s}, allowed: a time")
        key = (rendezvous_id, child.request_id)
        if key not in self._adverts and len(self._adverts) >= self._max_open:
            raise QueueFullError(f"{self._max_open} adverts are open")
        advert = Advert(key, child, expires_s, deadline_s, relaxed, done, self._on_advert_answer)
        self.pending.submit(advert)
        self._adverts[key] = advert

    def await_children(
        self, rendezvous_id: str, expected_children: int, ttl_s: float, sink: AwaitSink, expires_s: float
    ) -> None:
        """Await a rendezvous and keep that up until it is over, refused, `expires_s`, or `forget_await`. The service is
        asked for the events of children; `complete` and the usual end follow from those.

        Raises:
            QueueFullError: too many are open.
            ValueError: this client awaits it already, or its life is not a number.
        """
        if expires_s != expires_s:  # the timer would never come to rest with NaN
            raise ValueError(f"ttl_s: got {ttl_s}, allowed: seconds")
        if rendezvous_id in self._awaits:
            raise ValueError(f"rendezvous_id: {rendezvous_id!r} is awaited already by this client")
        if len(self._awaits) >= self._max_open:
            raise QueueFullError(f"{self._max_open} awaits are open")
        waiting = Await(rendezvous_id, expected_children, ttl_s, sink, expires_s, self._on_await_refusal)
        self.pending.submit(waiting)
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

    def end(self, operation: End, now_s: float, deadline_s: float, done: Done) -> None:
        """Send a cancellation, withdrawal or failure report. A withdrawn advert is no longer kept up.

        Raises:
            QueueFullError: too many operations wait.
        """
        if isinstance(operation, Withdrawal):
            self._adverts.pop((operation.rendezvous_id, operation.request_id), None)
        operation.said_s = now_s
        operation.deadline_s = deadline_s
        operation.done = done
        operation.remember = self._remember_end
        self.pending.submit(operation)

    def take_batch(self, now_s: float) -> ExchangeRequest | None:
        """Return all that is to be sent now, up to the size of a message; None when there is nothing."""
        return self.pending.take_batch(now_s)

    def reconnected(self, now_s: float) -> None:
        """A new stream starts: what the service may not know is to be sent again, in an order that is safe."""
        unanswered = self.pending.restart()
        waiting_for_answer = set(unanswered)
        for waiting in self._awaits.values():
            if waiting.op_id not in waiting_for_answer:
                self.pending.submit(waiting, again=True)
        for advert in list(self._adverts.values()):
            if advert.op_id not in waiting_for_answer:
                self._advertise_again(advert, now_s)
        for end in [self._ends.popleft() for _ in range(len(self._ends))]:
            if end.said_s + _REPEAT_S > now_s:
                end.relaxed, end.deadline_s, end.done = True, end.said_s + _REPEAT_S, ignore
                self.pending.submit(end, again=True)
        # What has no answer comes last, so that an end among it comes after the advert that it ends.
        self.pending.send_again(unanswered)

    def receive(self, response: ExchangeResponse, now_s: float) -> None:
        """Take over what the service says."""
        if response.service_id:
            self.service_id = response.service_id
        for result in response.results:
            self.pending.refused(result, now_s)
        self.pending.done(response.operations_done)
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

    def _await_refused(self, waiting: Await, error: MetaError) -> None:
        if self._awaits.get(waiting.rendezvous_id) is waiting:
            self.forget_await(waiting.rendezvous_id)
            waiting.sink.fail(error)

    def _advert_answered(self, advert: Advert, error: MetaError | None) -> None:
        done, advert.done = advert.done, None
        if error is not None and self._adverts.get(advert.key) is advert:
            if done is not None:
                del self._adverts[advert.key]
            elif isinstance(error, RendezvousEndedError):
                self._end_here(advert, error.outcome, error.message)
            elif not isinstance(error, MetaUnavailableError | MetaExhaustedError):
                # It stood before, and was refused when it was said again.
                self._end_here(advert, OUTCOME_FAILED, error.message)
            elif error.code is not grpc.StatusCode.CANCELLED:  # by the end of this client, which ends no advert
                self._end_here(advert, OUTCOME_EXPIRED, f"its time limit passed: {error.message}")
        else:
            error = None  # withdrawn meanwhile: how the advert fared no longer matters
        if done is not None:
            done(error)

    def _advertise_again(self, advert: Advert, now_s: float) -> None:
        if advert.expires_s <= now_s:
            self._end_here(advert, OUTCOME_EXPIRED, "its time limit passed while the meta service was away")
            return
        advert.relaxed, advert.deadline_s = True, advert.expires_s
        self.pending.submit(advert, again=True)

    def _receive_event(self, event: RendezvousEvent) -> None:
        rendezvous_id = event.rendezvous_id
        if self._adverts and event.HasField("child_ended"):
            ended = event.child_ended
            if self._adverts.pop((rendezvous_id, ended.request_id), None) is not None:
                self._on_child_ended(rendezvous_id, ended)
        waiting = self._awaits.get(rendezvous_id)
        if waiting is not None and waiting.sink.offer(event):
            self.forget_await(rendezvous_id)

    def _give_up_await(self, rendezvous_id: str, error: Exception) -> None:
        waiting = self._awaits.get(rendezvous_id)
        if waiting is not None:
            self.forget_await(rendezvous_id)
            message = f"rendezvous {rendezvous_id!r}: an event could not be taken: {type(error).__name__}: {error}"
            waiting.sink.fail(MetaError(grpc.StatusCode.INTERNAL, message))

    def _end_here(self, advert: Advert, outcome: Outcome, reason: str) -> None:
        del self._adverts[advert.key]
        rendezvous_id, request_id = advert.key
        child = advert.child
        ended = ChildEnded(
            request_id=request_id,
            outcome=outcome,
            reason=reason,
            prompt_index=child.prompt_index,
            choice_index=child.choice_index,
        )
        self._on_child_ended(rendezvous_id, ended)
