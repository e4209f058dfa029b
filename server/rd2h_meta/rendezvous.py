"""The rendezvous table: adverts of Decode meet awaits of the proxy. Pure: time comes in, nothing blocks, no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    Child,
    Outcome,
    WithdrawRequest,
)

from rd2h_meta import validation
from rd2h_meta.errors import ConflictError, EndedError, InvalidFieldError, LimitError, MetaServiceError
from rd2h_meta.expiry import ExpiryQueue
from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous_events import Advertised, ChildEnd, Closed, Complete, Ended, Event, outcome_name
from rd2h_meta.rendezvous_memory import RendezvousMemory
from rd2h_meta.rendezvous_record import NEVER_S, LiveChild, RendezvousRecord
from rd2h_meta.rendezvous_stats import RendezvousStats

Emit = Callable[[int, Event], None]
"""Hands an event to a subscriber (an Exchange or Await stream), without blocking."""

NOBODY = 0
"""The subscriber number of a unary caller, who is told nothing later."""

_LIFE_OVER = "its time limit passed"


class RendezvousTable:
    """All open rendezvous, and the ended ones that late joiners may ask for.

    A subscriber is a number that the caller gives to a stream; events for it go through `emit`. Every method that
    takes `now_s` expects one monotonic clock, in seconds.
    """

    def __init__(self, limits: RendezvousLimits, emit: Emit) -> None:
        self._limits = limits
        self._emit = emit
        self._open: dict[str, RendezvousRecord] = {}
        self._memory = RendezvousMemory(limits)
        self._expiry: ExpiryQueue[str] = ExpiryQueue()
        self._awaited_by: dict[int, set[str]] = {}
        self._live_children = 0
        self.stats = RendezvousStats(limits.recent_failures)

    @property
    def open_count(self) -> int:
        """Rendezvous open now."""
        return len(self._open)

    @property
    def live_children(self) -> int:
        """Children advertised and not ended."""
        return self._live_children

    @property
    def remembered_count(self) -> int:
        """Ended rendezvous still remembered."""
        return len(self._memory)

    @property
    def waiter_count(self) -> int:
        """Subscribers that await at least one open rendezvous."""
        return len(self._awaited_by)

    def advertise(self, rendezvous_id: str, child: Child, ttl_s: float, subscriber: int, now_s: float) -> None:
        """A Decode child tells where it wants its KV. The same child again only extends its life.

        Raises:
            InvalidFieldError, ConflictError, LimitError, PreconditionError, EndedError.
        """
        validation.check_rendezvous_id(rendezvous_id)
        validation.check_child(child)
        request_id = child.request_id
        deadline_s = now_s + self._clamp_ttl_s(ttl_s)
        record = self._open.get(rendezvous_id)
        if record is not None:
            end = record.ended.get(request_id)
            if end is not None:
                raise _ended_error(rendezvous_id, request_id, end.outcome, end.reason)
            known = record.live.get(request_id)
            if known is not None:
                self._renew_child(rendezvous_id, record, known, child, deadline_s, subscriber)
                return
            record.check_room(rendezvous_id, self._limits.max_children)
        elif (remembered := self._memory.get(rendezvous_id)) is not None:
            raise _ended_error(rendezvous_id, request_id, *remembered.end_of(request_id))
        if self._live_children >= self._limits.max_live_children:
            raise LimitError(f"{self._limits.max_live_children} children are live", self._limits.retry_after_s)
        if record is None:
            record = self._create(rendezvous_id, deadline_s)
        # Part of a message, it would keep the whole of that in memory: up to 4 MiB for each child.
        kept = Child()
        kept.CopyFrom(child)
        record.live[request_id] = LiveChild(kept, deadline_s, subscriber)
        self._live_children += 1
        self.stats.advertised += 1
        self._extend_if_unawaited(record, deadline_s)
        if deadline_s < record.scheduled_s:
            self._look_at(rendezvous_id, record, deadline_s)
        if record.waiters:
            self._tell(record.waiters, Advertised(rendezvous_id, kept))
            self._tell_if_complete(rendezvous_id, record)

    def await_children(
        self,
        rendezvous_id: str,
        expected_children: int,
        ttl_s: float,
        subscriber: int,
        now_s: float,
        children_only: bool = False,
    ) -> None:
        """A proxy waits for the children of a request; what has happened already is emitted before this returns. With
        `children_only` it concludes by itself what follows from the children's events.

        Raises:
            InvalidFieldError, LimitError, PreconditionError.
        """
        validation.check_rendezvous_id(rendezvous_id)
        if not 1 <= expected_children <= self._limits.max_children:
            raise InvalidFieldError("expected_children", expected_children, f"1..{self._limits.max_children}")
        deadline_s = now_s + self._clamp_ttl_s(ttl_s)
        record = self._open.get(rendezvous_id)
        known = record is not None
        if record is None:
            remembered = self._memory.get(rendezvous_id)
            if remembered is not None:
                self._tell_all(subscriber, remembered.replay(rendezvous_id))
                return
            record = self._create(rendezvous_id, deadline_s)
        record.expect(rendezvous_id, expected_children, deadline_s)
        record.add_waiter(subscriber)
        record.tell_conclusions = record.tell_conclusions or not children_only
        awaited = self._awaited_by.get(subscriber)
        if awaited is None:
            awaited = self._awaited_by[subscriber] = set()
        awaited.add(rendezvous_id)
        if known:
            record.note_complete()
            self._look_at(rendezvous_id, record, deadline_s)
            self._tell_all(subscriber, record.replay(rendezvous_id))
            self._close_if_all_ended(rendezvous_id, record, now_s)

    def cancel(self, rendezvous_id: str, outcome: Outcome, reason: str, now_s: float) -> None:
        """End a whole rendezvous. Unknown ones are remembered, so that a late advert learns of it.

        Raises:
            InvalidFieldError.
        """
        validation.check_rendezvous_id(rendezvous_id)
        self._close(rendezvous_id, validation.cancel_outcome(outcome), validation.clean_reason(reason), now_s)

    def withdraw(self, request: WithdrawRequest, subscriber: int, now_s: float) -> None:
        """Decode takes back a child, advertised or not.

        Raises:
            InvalidFieldError, LimitError, PreconditionError.
        """
        validation.check_rendezvous_id(request.rendezvous_id)
        validation.check_text("request_id", request.request_id, validation.MAX_REQUEST_ID_BYTES)
        validation.check_withdraw_outcome(request.outcome)
        validation.check_indices("withdraw", request.prompt_index, request.choice_index)
        reason = validation.clean_reason(request.reason)
        end = ChildEnd(request.outcome, reason, request.prompt_index, request.choice_index)
        self._end_children(request.rendezvous_id, (request.request_id,), end, subscriber, now_s)

    def report_failure(self, rendezvous_id: str, request_ids: Iterable[str], reason: str, now_s: float) -> None:
        """Some or (without `request_ids`) all children will get no KV, also those that advertise later.

        Raises:
            InvalidFieldError, LimitError, PreconditionError.
        """
        validation.check_rendezvous_id(rendezvous_id)
        if not reason:
            raise InvalidFieldError("reason", reason, "words that say why")
        reason = validation.clean_reason(reason)
        wanted = tuple(dict.fromkeys(request_ids))
        if len(wanted) > self._limits.max_request_ids:
            raise InvalidFieldError("request_ids", f"{len(wanted)} ids", f"at most {self._limits.max_request_ids}")
        for request_id in wanted:
            validation.check_text("request_ids", request_id, validation.MAX_REQUEST_ID_BYTES)
        if wanted:
            self._end_children(rendezvous_id, wanted, ChildEnd(OUTCOME_FAILED, reason, 0, 0), NOBODY, now_s)
        else:
            self._close(rendezvous_id, OUTCOME_FAILED, reason, now_s)

    def drop_subscriber(self, subscriber: int) -> None:
        """A stream is gone. What it advertised and awaited lives on until its time limit."""
        for rendezvous_id in self._awaited_by.pop(subscriber, ()):
            self._open[rendezvous_id].drop_waiter(subscriber)

    def expire(self, now_s: float) -> None:
        """End what has run out by `now_s`, and forget what was remembered long enough."""
        for rendezvous_id in self._expiry.pop_due(now_s):
            record = self._open[rendezvous_id]
            record.scheduled_s = NEVER_S
            if record.deadline_s <= now_s:
                self._close(rendezvous_id, OUTCOME_EXPIRED, _LIFE_OVER, now_s)
                continue
            for request_id in [name for name, live in record.live.items() if live.deadline_s <= now_s]:
                end = ChildEnd(OUTCOME_EXPIRED, _LIFE_OVER, 0, 0)
                self._end_child(rendezvous_id, record, request_id, end, NOBODY, now_s)
            if not self._close_if_all_ended(rendezvous_id, record, now_s):
                self._look_at(rendezvous_id, record, record.next_deadline_s())
        self._memory.forget_due(now_s)

    def shift_deadlines(self, delta_s: float) -> None:
        """Move all deadlines: the service itself did not run for `delta_s`."""
        self._expiry.shift(delta_s)
        for record in self._open.values():
            record.shift_deadlines(delta_s)

    def _renew_child(
        self,
        rendezvous_id: str,
        record: RendezvousRecord,
        known: LiveChild,
        child: Child,
        deadline_s: float,
        subscriber: int,
    ) -> None:
        if known.child.token != child.token:
            raise ConflictError(
                f"child.request_id: {child.request_id!r} is already advertised in {rendezvous_id!r} with another token"
            )
        known.deadline_s = max(known.deadline_s, deadline_s)
        known.advertiser = subscriber
        self._extend_if_unawaited(record, deadline_s)

    def _extend_if_unawaited(self, record: RendezvousRecord, deadline_s: float) -> None:
        """Without a waiter a rendezvous lives as long as its longest child."""
        if not record.expected_children:
            record.deadline_s = max(record.deadline_s, deadline_s)

    def _create(self, rendezvous_id: str, deadline_s: float) -> RendezvousRecord:
        if len(self._open) >= self._limits.max_open:
            raise LimitError(f"{self._limits.max_open} rendezvous are open", self._limits.retry_after_s)
        record = self._open[rendezvous_id] = RendezvousRecord(deadline_s)
        self._look_at(rendezvous_id, record, deadline_s)
        return record

    def _end_children(
        self, rendezvous_id: str, request_ids: tuple[str, ...], end: ChildEnd, subscriber: int, now_s: float
    ) -> None:
        record = self._open.get(rendezvous_id)
        if record is None:
            if self._memory.get(rendezvous_id) is not None:
                return
            record = self._create(rendezvous_id, now_s + self._limits.memory_s)
        refusal: MetaServiceError | None = None
        for request_id in request_ids:
            if request_id in record.ended:
                continue
            if request_id not in record.live:
                try:
                    record.check_room(rendezvous_id, self._limits.max_children)
                except MetaServiceError as error:
                    refusal = error  # the others have ended all the same, and their waiters must learn of it
                    continue
            self._end_child(rendezvous_id, record, request_id, end, subscriber, now_s)
        self._tell_if_complete(rendezvous_id, record)
        self._close_if_all_ended(rendezvous_id, record, now_s)
        if refusal is not None:
            raise refusal

    def _end_child(
        self,
        rendezvous_id: str,
        record: RendezvousRecord,
        request_id: str,
        end: ChildEnd,
        subscriber: int,
        now_s: float,
    ) -> None:
        """End a live or unknown child; tell the waiters, and its advertiser unless that is `subscriber`."""
        live = record.live.pop(request_id, None)
        if live is not None:
            self._live_children -= 1
            child = live.child
            end = ChildEnd(end.outcome, end.reason, child.prompt_index, child.choice_index)
        record.ended[request_id] = end
        self.stats.note_child(rendezvous_id, request_id, end, now_s)
        event = Ended(rendezvous_id, request_id, end)
        self._tell(record.waiters, event)
        if live is not None and live.advertiser not in (NOBODY, subscriber) and live.advertiser not in record.waiters:
            self._emit(live.advertiser, event)

    def _close_if_all_ended(self, rendezvous_id: str, record: RendezvousRecord, now_s: float) -> bool:
        end = record.final_end()
        if end is not None:
            self._close(rendezvous_id, *end, now_s, tell=record.tell_conclusions)
        return end is not None

    def _close(self, rendezvous_id: str, outcome: Outcome, reason: str, now_s: float, tell: bool = True) -> None:
        """Move a rendezvous from the open ones to the memory. Closing again changes nothing. Without `tell` the waiters
        know it by themselves."""
        record = self._open.pop(rendezvous_id, None)
        if record is None:
            if self._memory.get(rendezvous_id) is not None:
                return
            record = RendezvousRecord(now_s)
        self._expiry.discard(rendezvous_id)
        for request_id, live in record.live.items():
            end = ChildEnd(outcome, reason, live.child.prompt_index, live.child.choice_index)
            record.ended[request_id] = end
            self.stats.children[outcome] += 1
            if live.advertiser != NOBODY:
                self._emit(live.advertiser, Ended(rendezvous_id, request_id, end))
        self._live_children -= len(record.live)
        record.live.clear()
        self.stats.note_rendezvous(rendezvous_id, outcome, reason, now_s)
        self._memory.add(rendezvous_id, outcome, reason, record.ended, now_s)
        if tell:
            self._tell(record.waiters, Closed(rendezvous_id, outcome, reason))
        for subscriber in record.waiters:
            self._forget_waiter(subscriber, rendezvous_id)

    def _forget_waiter(self, subscriber: int, rendezvous_id: str) -> None:
        awaited = self._awaited_by.get(subscriber)
        if awaited is not None:
            awaited.discard(rendezvous_id)
            if not awaited:
                del self._awaited_by[subscriber]

    def _tell_if_complete(self, rendezvous_id: str, record: RendezvousRecord) -> None:
        if record.note_complete() and record.tell_conclusions:
            self._tell(record.waiters, Complete(rendezvous_id, len(record.live)))

    def _tell(self, subscribers: Iterable[int], event: Event) -> None:
        for subscriber in subscribers:
            self._emit(subscriber, event)

    def _tell_all(self, subscriber: int, events: Iterable[Event]) -> None:
        for event in events:
            self._emit(subscriber, event)

    def _look_at(self, rendezvous_id: str, record: RendezvousRecord, deadline_s: float) -> None:
        """Queue a record to be looked at by `deadline_s`; a later time than the queued one needs nothing."""
        if deadline_s < record.scheduled_s:
            record.scheduled_s = deadline_s
            self._expiry.set(rendezvous_id, deadline_s)

    def _clamp_ttl_s(self, ttl_s: float) -> float:
        limits = self._limits
        if limits.min_ttl_s <= ttl_s <= limits.max_ttl_s:
            return ttl_s
        return min(max(ttl_s or limits.default_ttl_s, limits.min_ttl_s), limits.max_ttl_s)


def _ended_error(rendezvous_id: str, request_id: str, outcome: Outcome, reason: str) -> EndedError:
    return EndedError(
        f"child {request_id!r} of rendezvous {rendezvous_id!r} has ended ({outcome_name(outcome)}): {reason}", outcome
    )
