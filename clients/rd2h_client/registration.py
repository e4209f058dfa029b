"""An engine's registration: lease, keep-alive, return after a service restart."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from rd2h_client.channels import Metadata
from rd2h_client.errors import MetaError, MetaExhaustedError, MetaUnavailableError, from_rpc_error
from rd2h_client.options import ClientOptions
from rd2h_client.v1 import engine_registry_pb2 as pb

logger = logging.getLogger("rd2h.client")

_SHORTEST_PAUSE_S = 0.1
"""Between two renewals, whatever lease time a service grants; ours grants a second at least."""

_ABOUT_THE_ENGINE = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Refusals that would be the same again. Any other one (INTERNAL, a token that is being changed, a call that something
between reset) may be taken back, and an engine must not stay away for ever because of it."""


@dataclass(frozen=True)
class EngineStatus:
    """What an engine reports with every keep-alive."""

    state: pb.EngineState = pb.ENGINE_STATE_SERVING
    """Where the engine is in its life."""
    load: pb.Load | None = None
    """How busy it is; None leaves the last report."""
    health: pb.DataPathHealth | None = None
    """Health of its data path; None leaves the last report."""


class Registration:
    """Keeps one engine registered until `close`. Made by MetaClient.register."""

    def __init__(
        self,
        stub: Any,
        metadata: Metadata,
        options: ClientOptions,
        engine: pb.Engine,
        poll: Callable[[], EngineStatus] | None,
        ttl_s: float,
        on_closed: Callable[[Registration], None] | None = None,
    ) -> None:
        """`poll` is asked before each keep-alive; without it the last `update` counts. `on_closed`: see `close`."""
        self._stub = stub
        self._metadata = metadata
        self._options = options
        self._engine = pb.Engine()
        self._engine.CopyFrom(engine)
        self._poll = poll
        self._wished_ttl_s = ttl_s
        self._on_closed = on_closed
        self._ttl_s = 0.0
        self._lease_id = ""
        self._kick = asyncio.Event()
        self._register_again = False
        self._task: asyncio.Task[None] | None = None
        self.lost: MetaError | None = None
        """Set when the service refused the engine for good (another generation took its name, say)."""

    @property
    def lease_id(self) -> str:
        """The present lease; empty before the first registration."""
        return self._lease_id

    @property
    def ttl_s(self) -> float:
        """The granted lease time."""
        return self._ttl_s

    async def start(self) -> None:
        """Register, then keep the lease.

        Raises:
            MetaError: the service refused the engine, or could not be reached before the deadline.
        """
        await self._register()
        self.start_keeping()

    def start_keeping(self) -> None:
        """Keep the engine registered from now on, however long the service is away."""
        self._task = asyncio.create_task(self._keep())

    def update(
        self,
        state: pb.EngineState | None = None,
        load: pb.Load | None = None,
        health: pb.DataPathHealth | None = None,
    ) -> None:
        """Report state and health at once, load with the next keep-alive."""
        if state is not None:
            self._engine.state = state
        if load is not None:
            self._engine.load.CopyFrom(load)
        if health is not None:
            self._engine.health.CopyFrom(health)
        if state is not None or health is not None:
            self._kick.set()

    def replace(self, engine: pb.Engine) -> None:
        """Register the engine anew with other facts (its layout has become known, say)."""
        self._engine.CopyFrom(engine)
        self.renew(register=True)

    def renew(self, register: bool = False) -> None:
        """Renew at once; with `register` by a full registration."""
        self._register_again = self._register_again or register
        self._kick.set()

    async def close(self) -> None:
        """Tell `on_closed`, and end the lease. A service that cannot be reached, or refuses, sees it lapse."""
        if self._on_closed is not None:
            self._on_closed(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._lease_id:
            lease_id, self._lease_id = self._lease_id, ""
            try:
                await self._call(self._stub.Deregister, pb.DeregisterRequest(lease_id=lease_id))
            except MetaError as error:
                logger.debug("deregister: %s", error)

    async def _keep(self) -> None:
        delay_s = 0.0 if not self._lease_id else self._renew_delay_s()
        failures = 0
        while True:
            try:
                async with asyncio.timeout(delay_s):
                    await self._kick.wait()
            except TimeoutError:
                pass  # the usual case: time to renew
            self._kick.clear()
            try:
                await self._renew()
            except MetaError as error:
                if error.code in _ABOUT_THE_ENGINE:
                    self.lost = error
                    logger.error("engine %s is no longer registered: %s", self._engine.engine_id, error)
                    return
                failures += 1
                delay_s = self._backoff_s(failures, error.retry_after_s)
                usual = failures > 1 or isinstance(error, MetaUnavailableError | MetaExhaustedError)
                logger.log(logging.DEBUG if usual else logging.WARNING, "engine %s: %s", self._engine.engine_id, error)
            except Exception:
                # `poll` is the caller's. While it cannot tell how the engine is, the lease is left to lapse.
                failures += 1
                delay_s = self._backoff_s(failures)
                logger.exception("engine %s: its lease is not renewed", self._engine.engine_id)
            else:
                failures = 0
                delay_s = self._renew_delay_s()

    def _backoff_s(self, failures: int, told_s: float | None = None) -> float:
        return told_s * random.uniform(0.5, 1.0) if told_s else self._options.retry.delay_s(failures)

    def _renew_delay_s(self) -> float:
        # Jitter keeps many engines from renewing in step after a restart of the service.
        return max(_SHORTEST_PAUSE_S, self._ttl_s / 3 * random.uniform(0.8, 1.0))

    async def _renew(self) -> None:
        if self._poll is not None:
            status = self._poll()
            self._engine.state = status.state
            if status.load is not None:
                self._engine.load.CopyFrom(status.load)
            if status.health is not None:
                self._engine.health.CopyFrom(status.health)
        if self._register_again or not self._lease_id:
            await self._register()
            return
        request = pb.KeepAliveRequest(lease_id=self._lease_id, state=self._engine.state)
        if self._engine.HasField("load"):
            request.load.CopyFrom(self._engine.load)
        if self._engine.HasField("health"):
            request.health.CopyFrom(self._engine.health)
        try:
            response = await self._call(self._stub.KeepAlive, request)
        except MetaError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            await self._register()
            return
        self._ttl_s = response.ttl_ms / 1000

    async def _register(self) -> None:
        self._register_again = False
        request = pb.RegisterRequest(engine=self._engine, requested_ttl_ms=round(self._wished_ttl_s * 1000))
        try:
            response = await self._call(self._stub.Register, request)
        except MetaError:
            self._register_again = True
            raise
        self._lease_id = response.lease_id
        self._ttl_s = response.ttl_ms / 1000

    async def _call(self, method: Any, request: Any) -> Any:
        deadline_s = self._options.deadline_s
        if self._ttl_s:
            deadline_s = min(deadline_s, max(1.0, self._ttl_s / 3))
        try:
            return await method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
