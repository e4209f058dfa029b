"""The whole service in one object: start, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rd2h_client.addresses import join_host_port
from rd2h_client.v1 import engine_registry_pb2, engine_registry_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc

from rd2h_meta.config import ConfigError, MetaConfig, parse_listen
from rd2h_meta.credentials import TokenInterceptor, read_token, server_credentials
from rd2h_meta.engine_service import EngineService
from rd2h_meta.health_service import HealthService
from rd2h_meta.limits import RegistryLimits, RendezvousLimits, ServerLimits
from rd2h_meta.metrics import MetricsEndpoint, MetricsSource
from rd2h_meta.registry import EngineRegistry
from rd2h_meta.rendezvous_service import RendezvousService

_TICK_S = 0.1
"""How often deadlines are looked at."""

_PAUSE_S = 1.0
"""A tick that comes later than this means that the process did not run (SIGSTOP, a stalled host): nobody could renew
anything in that time, so it does not count."""

logger = logging.getLogger("rd2h.meta")


def limits_of(config: MetaConfig) -> ServerLimits:
    """Return the limits that the settings ask for."""
    registry = RegistryLimits(
        max_engines=config.max_engines, grace_s=config.restart_grace_s, default_ttl_s=config.default_ttl_s
    )
    return ServerLimits(registry, RendezvousLimits(max_open=config.max_open, max_children=config.max_children))


class MetaServer:
    """Both services, health and reflection on one port. Use `start`, then `drain` once."""

    def __init__(self, config: MetaConfig, limits: ServerLimits | None = None) -> None:
        """Must be made on the event loop that will serve.

        Raises:
            ConfigError: a credential file cannot be read.
        """
        self._config = config
        self._limits = limits or limits_of(config)
        self.service_id = secrets.token_hex(8)
        self.registry = EngineRegistry(
            self.service_id, self._limits.registry, time.monotonic(), lambda: secrets.token_hex(16)
        )
        self.engine_service = EngineService(self.registry)
        self.rendezvous_service = RendezvousService(self.service_id, self._limits)
        self.health_service = HealthService(self.registry)
        token = read_token(config)
        self._token_interceptor = TokenInterceptor(token) if token else None
        self._credentials = server_credentials(config)
        self._servers: list[grpc.aio.Server] = []
        self._metrics: MetricsEndpoint | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.address = ""
        """host:port that is served, once started."""
        self.probe_address = ""
        """host:port of the listener for probes, once started; empty without one."""
        self.metrics_address = ""
        """host:port of the metrics endpoint, once started; empty without one."""

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ConfigError: an address cannot be bound.
        """
        interceptors = (self._token_interceptor,) if self._token_interceptor else ()
        server = self._new_server(interceptors)
        rendezvous_pb2_grpc.add_RendezvousServicer_to_server(self.rendezvous_service, server)
        engine_registry_pb2_grpc.add_EngineRegistryServicer_to_server(self.engine_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health_service, server)
        names = [
            engine_registry_pb2.DESCRIPTOR.services_by_name["EngineRegistry"].full_name,
            rendezvous_pb2.DESCRIPTOR.services_by_name["Rendezvous"].full_name,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ]
        reflection.enable_server_reflection(names, server)
        self.address = _bind(server, "listen", self._config.listen, self._credentials)
        if self._config.probe_listen:
            probes = self._new_server(())
            health_pb2_grpc.add_HealthServicer_to_server(self.health_service, probes)
            self.probe_address = _bind(probes, "probe_listen", self._config.probe_listen, None)
        if self._config.metrics_listen:
            source = MetricsSource(self.registry, self.rendezvous_service, self._token_interceptor)
            self._metrics = MetricsEndpoint(source)
            host, port = parse_listen("metrics_listen", self._config.metrics_listen)
            try:
                self.metrics_address = await self._metrics.start(host, port)
            except (OSError, UnicodeError) as error:
                # UnicodeError: the resolver's word for a name that cannot exist.
                raise _cannot_bind("metrics_listen", self._config.metrics_listen) from error
        for server in self._servers:
            await server.start()
        self._ticker = asyncio.create_task(self._tick())
        logger.info("serving", extra={"fields": {"address": self.address, "service_id": self.service_id}})

    async def drain(self) -> None:
        """Take nothing new, let waiters finish within the grace period, then end all streams and stop."""
        grace_s = self._config.grace_s
        deadline_s = time.monotonic() + grace_s
        logger.info("draining", extra={"fields": {"waiters": self.rendezvous_service.table.waiter_count}})
        self.health_service.start_draining()
        self.engine_service.start_draining()
        self.rendezvous_service.start_draining()
        while self.rendezvous_service.table.waiter_count and time.monotonic() < deadline_s:
            await asyncio.sleep(_TICK_S / 2)
        self.rendezvous_service.close_streams()
        self.health_service.close_streams()
        left_s = max(0.5, deadline_s - time.monotonic())
        await asyncio.gather(*(server.stop(min(left_s, 2.0)) for server in self._servers))
        if self._ticker:
            self._ticker.cancel()
        if self._metrics:
            await self._metrics.stop()
        logger.info("stopped")

    def _new_server(self, interceptors: Sequence[TokenInterceptor]) -> grpc.aio.Server:
        options = (
            ("grpc.so_reuseport", 0),  # a second service on one port must fail, not share its connections
            ("grpc.max_receive_message_length", self._limits.max_message_bytes),
            ("grpc.max_send_message_length", self._limits.max_reply_bytes),
            ("grpc.max_concurrent_streams", self._limits.max_concurrent_streams),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        )
        server = grpc.aio.server(interceptors=interceptors, options=options)
        self._servers.append(server)
        return server

    async def _tick(self) -> None:
        """Expire what is due. Runs until cancelled."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            late_s = now_s - last_s - _TICK_S
            if late_s > _PAUSE_S:
                logger.warning("this process did not run", extra={"fields": {"seconds": round(late_s, 3)}})
                self.registry.shift_deadlines(late_s)
                self.rendezvous_service.table.shift_deadlines(late_s)
            last_s = now_s
            for expire in (self.registry.expire, self.rendezvous_service.table.expire):
                try:
                    expire(now_s)
                except Exception:
                    # Without ticks nothing would ever end; one entry that cannot be ended must not stop them.
                    logger.exception("expiry failed")


def _bind(server: grpc.aio.Server, name: str, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """Bind `listen` and return the address with the port that was given."""
    host, port = parse_listen(name, listen)
    address = join_host_port(host, port)
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise _cannot_bind(name, listen) from error
    if bound == 0:
        raise _cannot_bind(name, listen)
    return join_host_port(host, bound)


def _cannot_bind(name: str, listen: str) -> ConfigError:
    return ConfigError(f"{name}: got {listen!r}, which cannot be bound (in use, or not an address here)")
