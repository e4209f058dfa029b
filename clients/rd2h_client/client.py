"""The asyncio client of the meta service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any

import grpc

from rd2h_client.addresses import parse_target
from rd2h_client.awaiting import ChildrenIterator
from rd2h_client.channels import call_metadata, channel_credentials, channel_options
from rd2h_client.engine_watch import EngineBatch, watch_engines
from rd2h_client.errors import ClientClosedError, MetaError, MetaUnavailableError, from_rpc_error, retry_delay_s
from rd2h_client.exchange_state import ExchangeState
from rd2h_client.exchange_stream import ExchangeStream
from rd2h_client.operations import Cancellation, End, FailureReport, Withdrawal
from rd2h_client.options import ClientOptions
from rd2h_client.registration import EngineStatus, Registration
from rd2h_client.v1 import engine_registry_pb2, rendezvous_pb2
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryStub
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousStub

_COMPLETION_GRACE_S = 0.02
_EXPIRY_SLACK_S = 5.0
"""How much longer than the service the client keeps an await before it takes the service for lost."""


class MetaClient:
    """One connection to a meta service. Use as `async with MetaClient("grpc://host:port") as client`.

    Adverts, awaits and ends travel in one batched stream. What is open is said again after a lost connection or a
    restart of the service. All methods belong to the event loop on which `start` ran.
    """

    def __init__(self, target: str, options: ClientOptions = ClientOptions()) -> None:  # noqa: B008  # frozen
        """Nothing is connected yet.

        Raises:
            AddressError: the target is malformed.
            OptionsError: the options contradict each other.
        """
        self.target = parse_target(target)
        self.options = options
        self._metadata = call_metadata(self.target, options)
        self._credentials = channel_credentials(self.target, options)
        self._state = ExchangeState(options.max_open, self._child_ended)
        self._on_child_ended: Callable[[str, rendezvous_pb2.ChildEnded], None] | None = None
        self._channel: Any = None
        self._registry: Any = None
        self._rendezvous: Any = None
        self._stream: ExchangeStream | None = None
        self._stream_task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._registrations: set[Registration] = set()

    async def __aenter__(self) -> MetaClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """True while the service answers on the Exchange stream."""
        return self._stream is not None and self._stream.connected

    @property
    def outage(self) -> str:
        """Why the service does not answer on the Exchange stream, for operators; empty while it does, and while
        nothing is known."""
        return self._stream.outage if self._stream is not None else ""

    @property
    def service_id(self) -> str:
        """Run of the service that answered last; empty before the first answer."""
        return self._state.service_id

    async def start(self) -> None:
        """Connect, and wait until the service answers.

        Raises:
            MetaUnavailableError: it did not before the connect deadline.
            MetaRefusedError: it refuses this client (a wrong token, say).
        """
        self.start_connecting()
        request = rendezvous_pb2.GetRendezvousStatsRequest()
        try:
            await self._unary(self._rendezvous.GetRendezvousStats, request, self.options.connect_deadline_s)
            async with asyncio.timeout(self.options.connect_deadline_s):
                await self._up.wait()
        except (MetaUnavailableError, TimeoutError) as error:
            reason = await self._connect_failure()
            await self.close()
            message = f"meta service {self.target.url}: no answer within {self.options.connect_deadline_s} s: {reason}"
            raise MetaUnavailableError(grpc.StatusCode.UNAVAILABLE, message) from error
        except BaseException:
            await self.close()
            raise

    def start_connecting(self) -> None:
        """Connect without waiting; operations wait for the service until their deadlines."""
        if self._stream is not None:
            return
        arguments = channel_options(self.options)
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.target.authority, arguments)
        else:
            self._channel = grpc.aio.secure_channel(self.target.authority, self._credentials, arguments)
        self._registry = EngineRegistryStub(self._channel)
        self._rendezvous = RendezvousStub(self._channel)
        self._stream = ExchangeStream(
            self._rendezvous, self._metadata, self._state, self.options.retry, self.target.url, self._service_seen
        )
        self._stream_task = asyncio.create_task(self._stream.run())

    async def close(self) -> None:
        """End registrations and streams. What was advertised and awaited lives on until its time limit."""
        try:
            for registration in list(self._registrations):
                await registration.close()
        finally:
            await self._close_stream()

    async def _close_stream(self) -> None:
        if self._stream_task is not None:
            self._stream_task.cancel()
            await asyncio.gather(self._stream_task, return_exceptions=True)
            self._stream_task = None
        self._stream = None
        self._state.fail_all(MetaUnavailableError(grpc.StatusCode.CANCELLED, "the client was closed"))
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
            # Completions of the cancelled calls are still on their way from gRPC's thread; a caller who ends the event
            # loop at once would have them logged as errors by every other loop of the process.
            await asyncio.sleep(_COMPLETION_GRACE_S)

    def on_child_ended(self, callback: Callable[[str, rendezvous_pb2.ChildEnded], None]) -> None:
        """Have `callback` called (on the event loop) when a child advertised here ends otherwise than by `withdraw`."""
        self._on_child_ended = callback

    def await_children(self, rendezvous_id: str, expected_children: int, ttl_s: float) -> ChildrenIterator:
        """Await the children of a request; the await is sent at once.

        Iterating raises MetaRefusedError when the service refuses the await, and MetaUnavailableError when the
        service stays away for longer than `ttl_s`. Close the iterator (`aclose`) when leaving it early.

        Raises:
            QueueFullError: too many awaits are open.
            ValueError: this client awaits it already.
        """
        stream = self._running_stream()
        expires_s = time.monotonic() + ttl_s + _EXPIRY_SLACK_S
        iterator = ChildrenIterator(rendezvous_id, expected_children, self._state.forget_await, stream.loop)
        self._state.await_children(rendezvous_id, expected_children, ttl_s, iterator, expires_s)
        stream.kick()
        return iterator

    async def advertise(self, rendezvous_id: str, child: rendezvous_pb2.Child, ttl_s: float | None = None) -> None:
        """Advertise a child, and keep the advert up until it is withdrawn, has ended, or `ttl_s` has passed.

        Raises:
            RendezvousEndedError: the child or the rendezvous had already ended.
            MetaError: refused, or no answer before the deadline.
            QueueFullError: too many adverts are open.
        """
        stream = self._running_stream()
        life_s = ttl_s if ttl_s is not None else self.options.advert_ttl_s
        now_s = time.monotonic()
        kept = rendezvous_pb2.Child()
        kept.CopyFrom(child)
        done = _Completion()
        self._state.advertise(rendezvous_id, kept, now_s + life_s, now_s + self.options.deadline_s, done)
        stream.kick()
        await done.future

    async def withdraw(
        self,
        rendezvous_id: str,
        request_id: str,
        outcome: rendezvous_pb2.Outcome,
        reason: str = "",
        prompt_index: int = 0,
        choice_index: int = 0,
    ) -> None:
        """Take back a child, advertised or not.

        Raises:
            MetaError: refused, or no answer before the deadline.
        """
        await self._end(Withdrawal(rendezvous_id, request_id, outcome, reason, prompt_index, choice_index))

    async def cancel(
        self, rendezvous_id: str, reason: str, outcome: rendezvous_pb2.Outcome = rendezvous_pb2.OUTCOME_ABORTED
    ) -> None:
        """End a whole rendezvous.

        Raises:
            MetaError: refused, or no answer before the deadline.
        """
        await self._end(Cancellation(rendezvous_id, reason, outcome))

    async def report_failure(self, rendezvous_id: str, reason: str, request_ids: Iterable[str] = ()) -> None:
        """Report that children (all, when none is named) will get no KV.

        Raises:
            MetaError: refused, or no answer before the deadline.
        """
        await self._end(FailureReport(rendezvous_id, reason, request_ids))

    async def list_engines(
        self, role: engine_registry_pb2.EngineRole = engine_registry_pb2.ENGINE_ROLE_UNSPECIFIED
    ) -> list[engine_registry_pb2.Engine]:
        """Return the engines with a live lease.

        Raises:
            MetaError: refused, or no answer before the deadline.
        """
        request = engine_registry_pb2.ListEnginesRequest(role=role)
        response: engine_registry_pb2.ListEnginesResponse = await self._unary(self._registry.ListEngines, request)
        return list(response.engines)

    def watch_engines(
        self, role: engine_registry_pb2.EngineRole = engine_registry_pb2.ENGINE_ROLE_UNSPECIFIED
    ) -> AsyncIterator[EngineBatch]:
        """Follow the registry for ever: a snapshot, then changes; another snapshot when changes were missed.

        Iterating raises MetaError when the service refuses the watch for good.
        """
        self._running_stream()
        return watch_engines(self._registry, self._metadata, self.options.retry, role)

    async def register(
        self,
        engine: engine_registry_pb2.Engine,
        poll: Callable[[], EngineStatus] | None = None,
        ttl_s: float = 0.0,
    ) -> Registration:
        """Register an engine and keep it registered; `poll` is asked before each keep-alive. 0 as `ttl_s` leaves the
        lease time to the service.

        Raises:
            MetaError: refused, or no answer before the deadline.
        """
        registration = self.new_registration(engine, poll, ttl_s)
        try:
            await registration.start()
        except BaseException:
            self._registrations.discard(registration)
            raise
        return registration

    def new_registration(
        self,
        engine: engine_registry_pb2.Engine,
        poll: Callable[[], EngineStatus] | None = None,
        ttl_s: float = 0.0,
    ) -> Registration:
        """Return a registration that is not started, for callers who do not want to wait."""
        self._running_stream()
        forget = self._registrations.discard
        registration = Registration(self._registry, self._metadata, self.options, engine, poll, ttl_s, forget)
        self._registrations.add(registration)
        return registration

    async def check_compatibility(self, prefill_engine_id: str, decode_engine_id: str) -> None:
        """Check that two registered engines fit together.

        Raises:
            MetaRefusedError: FAILED_PRECONDITION names the field and both values; NOT_FOUND an unknown engine.
            MetaUnavailableError: no answer before the deadline.
        """
        request = engine_registry_pb2.CheckCompatibilityRequest(
            prefill_engine_id=prefill_engine_id, decode_engine_id=decode_engine_id
        )
        await self._unary(self._registry.CheckCompatibility, request)

    async def stats(self) -> rendezvous_pb2.GetRendezvousStatsResponse:
        """Return counts and recent failures.

        Raises:
            MetaError: refused, or no answer before the deadline.
        """
        request = rendezvous_pb2.GetRendezvousStatsRequest()
        response: rendezvous_pb2.GetRendezvousStatsResponse = await self._unary(
            self._rendezvous.GetRendezvousStats, request
        )
        return response

    @property
    def exchange(self) -> ExchangeState:
        """The memory of the Exchange stream, for clients built on this one; call `kick` after a change."""
        return self._state

    def kick(self) -> None:
        """Send what was put into `exchange`."""
        self._running_stream().kick()

    async def _end(self, operation: End) -> None:
        stream = self._running_stream()
        now_s = time.monotonic()
        done = _Completion()
        self._state.end(operation, now_s, now_s + self.options.deadline_s, done)
        stream.kick()
        await done.future

    async def _unary(self, method: Any, request: Any, wait_s: float | None = None, wait_for_ready: bool = True) -> Any:
        self._running_stream()
        wait_s = wait_s or self.options.deadline_s
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return await method(request, timeout=left_s, metadata=self._metadata, wait_for_ready=wait_for_ready)
            except grpc.aio.AioRpcError as error:
                refusal = from_rpc_error(error, wait_s)
                delay_s = retry_delay_s(refusal, deadline_s - time.monotonic())
                if delay_s is None:
                    raise refusal from error
            await asyncio.sleep(delay_s)

    async def _connect_failure(self) -> str:
        """Return in words why the service does not answer."""
        try:
            request = rendezvous_pb2.GetRendezvousStatsRequest()
            await self._unary(self._rendezvous.GetRendezvousStats, request, wait_s=1.0, wait_for_ready=False)
        except MetaError as error:
            return error.message
        return "it has just come up"

    def _service_seen(self) -> None:
        """The stream is up again: leases may be gone, so renew them without waiting for their turn."""
        self._up.set()
        for registration in self._registrations:
            registration.renew()

    def _child_ended(self, rendezvous_id: str, ended: rendezvous_pb2.ChildEnded) -> None:
        if self._on_child_ended is not None:
            self._on_child_ended(rendezvous_id, ended)

    def _running_stream(self) -> ExchangeStream:
        if self._stream is None:
            raise ClientClosedError("the client is not started, or was closed")
        return self._stream


class _Completion:
    """Turns the outcome of an operation into a future."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: MetaError | None) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
