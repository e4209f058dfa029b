"""The gRPC face of the rendezvous table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from rd2h_client.v1 import rendezvous_pb2 as pb
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousServicer

from rd2h_meta.errors import InvalidFieldError, LimitError, MetaServiceError, NotYetError
from rd2h_meta.limits import ServerLimits
from rd2h_meta.outbox import Outbox
from rd2h_meta.rendezvous import NOBODY, RendezvousTable
from rd2h_meta.rendezvous_events import Event
from rd2h_meta.status import abort, refusal_of

logger = logging.getLogger("rd2h.meta")

OPERATIONS_PER_TURN = 256
"""Operations of one message applied before other streams, and what these operations brought about, get their turn: one
to two milliseconds of work."""

SMALL_MESSAGE_OPERATIONS = 128
SMALL_TURN_OPERATIONS = 48
"""A message of a few operations comes when there is little to do: the peer had better take the first news while the
rest is applied. Much to do comes in large messages, and is done sooner when the news is not split: a message costs as
much as ten to thirty operations."""

Context = Any
"""grpc.aio.ServicerContext; its published types do not fit the asyncio server."""


class RendezvousService(RendezvousServicer):
    """Serves one rendezvous table. All calls run on one event loop, so the table needs no lock."""

    def __init__(self, service_id: str, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._service_id = service_id
        self._limits = limits
        self._clock = clock
        self._started_s = clock()
        self._outboxes: dict[int, Outbox] = {}
        self._last_subscriber = NOBODY
        self._exchange_streams = 0
        self._draining = False
        self.table = RendezvousTable(limits.rendezvous, self._emit)
        self.operations_total = 0
        """Operations applied since the start, over streams and unary calls."""
        self.overflowed_streams_total = 0
        """Streams ended because their client read too slowly."""

    @property
    def exchange_streams(self) -> int:
        """Open Exchange streams."""
        return self._exchange_streams

    def start_draining(self) -> None:
        """Refuse new awaits from now on; adverts for present waiters still come in."""
        self._draining = True

    def close_streams(self) -> None:
        """End every stream once its outbox is written."""
        for outbox in self._outboxes.values():
            outbox.close()

    async def Exchange(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ExchangeRequest], context: Context
    ) -> AsyncIterator[pb.ExchangeResponse]:
        """See rendezvous.proto."""
        with self._subscribe() as (subscriber, outbox):
            if subscriber == NOBODY:
                await abort(context, LimitError(f"{self._limits.max_streams} streams are open", 1.0))
            self._exchange_streams += 1
            reader = asyncio.create_task(self._read_operations(request_iterator, subscriber, outbox))
            try:
                yield pb.ExchangeResponse(service_id=self._service_id)
                while (response := await outbox.take()) is not None:
                    yield response
                if outbox.overflowed:
                    self.overflowed_streams_total += 1
                    await abort(context, LimitError("this stream is read too slowly; send open operations again", 0.1))
                if self._draining:
                    await abort(context, NotYetError("the service drains"))
                await reader
            finally:
                self._exchange_streams -= 1
                reader.cancel()
                reader.add_done_callback(_note_defect)

    async def Advertise(self, request: pb.AdvertiseRequest, context: Context) -> pb.AdvertiseResponse:  # noqa: N802
        """See rendezvous.proto."""
        await self._apply_unary(pb.Operation(advertise=request), context)
        return pb.AdvertiseResponse()

    async def Await(self, request: pb.AwaitRequest, context: Context) -> AsyncIterator[pb.AwaitResponse]:  # noqa: N802
        """See rendezvous.proto."""
        with self._subscribe() as (subscriber, outbox):
            if subscriber == NOBODY:
                await abort(context, LimitError(f"{self._limits.max_streams} streams are open", 1.0))
            try:
                self._apply(pb.Operation(await_children=request), subscriber, self._clock())
            except MetaServiceError as error:
                await abort(context, error)
            while (response := await outbox.take()) is not None:
                yield pb.AwaitResponse(events=response.events)
                if response.events[-1].HasField("closed"):
                    return
            if outbox.overflowed:
                self.overflowed_streams_total += 1
                await abort(context, LimitError("this stream is read too slowly; await again", 0.1))
            await abort(context, NotYetError("the service drains"))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """See rendezvous.proto."""
        await self._apply_unary(pb.Operation(cancel=request), context)
        return pb.CancelResponse()

    async def Withdraw(self, request: pb.WithdrawRequest, context: Context) -> pb.WithdrawResponse:  # noqa: N802
        """See rendezvous.proto."""
        await self._apply_unary(pb.Operation(withdraw=request), context)
        return pb.WithdrawResponse()

    async def ReportFailure(  # noqa: N802
        self, request: pb.ReportFailureRequest, context: Context
    ) -> pb.ReportFailureResponse:
        """See rendezvous.proto."""
        await self._apply_unary(pb.Operation(report_failure=request), context)
        return pb.ReportFailureResponse()

    async def GetRendezvousStats(  # noqa: N802
        self, request: pb.GetRendezvousStatsRequest, context: Context
    ) -> pb.GetRendezvousStatsResponse:
        """See rendezvous.proto."""
        now_s = self._clock()
        table = self.table
        return pb.GetRendezvousStatsResponse(
            open=table.open_count,
            live_children=table.live_children,
            remembered=table.remembered_count,
            totals=table.stats.totals(),
            recent_failures=[
                pb.RecentFailure(
                    rendezvous_id=failure.rendezvous_id,
                    request_id=failure.request_id,
                    reason=failure.reason,
                    age_ms=max(0, round((now_s - failure.at_s) * 1000)),
                )
                for failure in table.stats.failures
            ],
            service_id=self._service_id,
            uptime_ms=round((now_s - self._started_s) * 1000),
            waiters=table.waiter_count,
            exchange_streams=self._exchange_streams,
        )

    def _emit(self, subscriber: int, event: Event) -> None:
        outbox = self._outboxes.get(subscriber)
        # A stream that ended a moment ago may still be named as the advertiser of a child.
        if outbox is not None:
            outbox.put_event(event)

    @contextmanager
    def _subscribe(self) -> Iterator[tuple[int, Outbox]]:
        """Give a stream a subscriber number and an outbox; the number is NOBODY when there are too many streams."""
        outbox = Outbox(self._limits.outbox_entries)
        if len(self._outboxes) >= self._limits.max_streams:
            yield NOBODY, outbox
            return
        self._last_subscriber += 1
        subscriber = self._last_subscriber
        self._outboxes[subscriber] = outbox
        try:
            yield subscriber, outbox
        finally:
            del self._outboxes[subscriber]
            self.table.drop_subscriber(subscriber)

    async def _read_operations(
        self, requests: AsyncIterator[pb.ExchangeRequest], subscriber: int, outbox: Outbox
    ) -> None:
        """Apply what a client sends, until it has no more to say; then let the stream end."""
        done, crowded_room = 0, outbox.crowded_room
        try:
            async for request in requests:
                now_s = self._clock()
                small = len(request.operations) <= SMALL_MESSAGE_OPERATIONS
                turn = SMALL_TURN_OPERATIONS if small else OPERATIONS_PER_TURN
                for number, operation in enumerate(request.operations, start=1):
                    try:
                        self._apply(operation, subscriber, now_s)
                    except MetaServiceError as error:
                        outbox.put_refusal(refusal_of(operation.op_id, error))
                    if number % turn == 0 or outbox.room < crowded_room:
                        await asyncio.sleep(0)
                        await outbox.wait_for_room()
                        now_s = self._clock()
                done += len(request.operations)
                outbox.note_done(done, request.relaxed)
        finally:
            outbox.close()

    async def _apply_unary(self, operation: pb.Operation, context: Context) -> None:
        try:
            self._apply(operation, NOBODY, self._clock())
        except MetaServiceError as error:
            await abort(context, error)

    def _apply(self, operation: pb.Operation, subscriber: int, now_s: float) -> None:
        self.operations_total += 1
        kind = operation.WhichOneof("op")
        if kind == "advertise":
            advert = operation.advertise
            self.table.advertise(advert.rendezvous_id, advert.child, advert.ttl_ms / 1000, subscriber, now_s)
        elif kind == "await_children":
            if self._draining:
                raise NotYetError("the service drains")
            wait = operation.await_children
            ttl_s = wait.ttl_ms / 1000
            self.table.await_children(
                wait.rendezvous_id, wait.expected_children, ttl_s, subscriber, now_s, wait.children_only
            )
        elif kind == "cancel":
            cancel = operation.cancel
            self.table.cancel(cancel.rendezvous_id, cancel.outcome, cancel.reason, now_s)
        elif kind == "withdraw":
            self.table.withdraw(operation.withdraw, subscriber, now_s)
        elif kind == "report_failure":
            failure = operation.report_failure
            self.table.report_failure(failure.rendezvous_id, failure.request_ids, failure.reason, now_s)
        else:
            raise InvalidFieldError("operation.op", kind, "advertise, await_children, cancel, withdraw, report_failure")


def _note_defect(reader: asyncio.Task[None]) -> None:
    """A reader that ended after its stream has nobody else to tell. gRPC's own errors say that the stream is over."""
    error = None if reader.cancelled() else reader.exception()
    if error is not None and not isinstance(error, grpc.aio.BaseError):
        logger.error("an exchange stream's reader ended: %s", error, exc_info=error)
