"""Drives the one Exchange stream of a client: connects, sends what is pending in one message, reconnects, and says in
the log when the service is lost and when it is back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from rd2h_client.channels import Metadata
from rd2h_client.errors import from_rpc_error
from rd2h_client.exchange_state import ExchangeState
from rd2h_client.options import RetryOptions

logger = logging.getLogger("rd2h.client")

_FINAL = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""Ends of the stream after which nothing that waits can succeed."""


class ExchangeStream:
    """Runs on one event loop. `run` until cancelled; call `kick` after something was put into the state."""

    def __init__(
        self,
        stub: Any,
        metadata: Metadata,
        state: ExchangeState,
        retry: RetryOptions,
        address: str,
        on_service: Callable[[], None],
    ) -> None:
        """Made on the event loop. `address` is the service's, for the log. `on_service` is called when a stream is
        up."""
        self.loop = asyncio.get_running_loop()
        self._stub = stub
        self._metadata = metadata
        self._state = state
        self._retry = retry
        self._address = address
        self._on_service = on_service
        self._wake = asyncio.Event()
        self._kicked = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = float("inf")
        self.connected = False
        """True while the service answers."""
        self.outage = ""
        """Why the service does not answer; empty while it does, and before the first try to connect has failed."""
        self._outage_code: grpc.StatusCode | None = None
        self._outage_since_s = 0.0

    def kick(self) -> None:
        """Something may be ready to send. Whatever comes within one turn of the event loop is one kick."""
        if not self._kicked:
            self._kicked = True
            self._wake.set()
            self.loop.call_soon(self._end_turn)

    async def run(self) -> None:
        """Keep a stream up for ever."""
        failures = 0
        while True:
            begun_s = time.monotonic()
            try:
                await self._one_stream()
            except Exception:
                # A defect, or a caller's callback. Without a stream every rendezvous of this client would be lost.
                logger.exception("exchange stream broke; another one follows")
            lasted_s = time.monotonic() - begun_s
            failures = 0 if lasted_s > self._retry.max_backoff_s else failures + 1
            await asyncio.sleep(self._retry.delay_s(failures))

    async def _one_stream(self) -> None:
        """Run one stream to its end."""
        # The first try tells why it fails. From then on gRPC connects again by itself, and sooner than we would.
        call = self._stub.Exchange(metadata=self._metadata, wait_for_ready=bool(self.outage))
        writer: asyncio.Task[None] | None = None
        try:
            while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                if writer is None:
                    # Only now is the service known to be there. What the message counts is of this stream.
                    self._state.reconnected(time.monotonic())
                self._state.receive(response, time.monotonic())
                if writer is None:
                    # The first message has said which run of the service this is.
                    self._wake.set()
                    writer = asyncio.create_task(self._write(call))
                    self.connected = True
                    self._outage_over()
                    self._on_service()
                self._set_timer()
                if not self._state.pending.nothing_to_send:
                    self._wake.set()
            self._note_outage(grpc.StatusCode.OK, "the service has ended the stream")
        except grpc.aio.AioRpcError as error:
            self._note_outage(error.code(), f"{error.code().name}: {error.details()}")
            self._note_failure(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # else the writer has ended the call
        finally:
            self.connected = False
            if writer is not None:
                writer.cancel()
            call.cancel()

    def _note_failure(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Perhaps one operation made the message too large. Sent again it would end every stream.
            self._state.pending.measure_all()
        if error.code() in _FINAL:
            self._state.fail_all(from_rpc_error(error))

    def _note_outage(self, code: grpc.StatusCode, reason: str) -> None:
        """Say that the service is lost: once an outage, and again when it fails in another way (refuses us, say)."""
        if not self.outage:
            self._outage_since_s = time.monotonic()
        self.outage = reason
        level = logging.DEBUG if code is self._outage_code else logging.WARNING
        self._outage_code = code
        logger.log(level, "meta service %s is lost: %s", self._address, reason)

    def _outage_over(self) -> None:
        if self.outage:
            away_s = time.monotonic() - self._outage_since_s
            logger.info("meta service %s is back after %.1f s", self._address, away_s)
            self.outage, self._outage_code = "", None

    async def _write(self, call: Any) -> None:
        """Send what is pending, one message at a time: what comes up during a write goes into the next one."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (batch := self._state.take_batch(time.monotonic())) is not None:
                    await call.write(batch)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader sees the same end, with its status; what was taken has no result and is sent again.
            return
        except Exception:
            logger.exception("exchange stream cannot be written; another one follows")
            call.cancel()

    def _end_turn(self) -> None:
        self._kicked = False
        self._set_timer()

    def _set_timer(self) -> None:
        due_s = self._state.next_wake_s()
        if due_s >= self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = due_s
        # The event loop's clock is the monotonic clock.
        self._timer = self.loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_due_s = float("inf")
        try:
            self._state.wake(time.monotonic() + 0.001)
        finally:  # it calls back; what a callback raises is the event loop's to report
            self._wake.set()
            self._set_timer()
