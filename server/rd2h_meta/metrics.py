"""Prometheus metrics of the service, in the text format, on a small HTTP endpoint of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rd2h_client.addresses import join_host_port
from rd2h_client.v1.engine_registry_pb2 import ENGINE_ROLE_UNSPECIFIED, EngineRole
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_ABORTED, OUTCOME_DONE, OUTCOME_EXPIRED, OUTCOME_FAILED

from rd2h_meta.credentials import TokenInterceptor
from rd2h_meta.registry import EngineHealth, EngineRegistry
from rd2h_meta.rendezvous_events import outcome_name
from rd2h_meta.rendezvous_service import RendezvousService

_MAX_REQUEST_BYTES = 8_192
_REQUEST_TIMEOUT_S = 5.0
_OUTCOMES = (OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_FAILED, OUTCOME_EXPIRED)


class MetricsSource:
    """Reads the numbers from the running service."""

    def __init__(
        self, registry: EngineRegistry, rendezvous: RendezvousService, interceptor: TokenInterceptor | None
    ) -> None:
        self._registry = registry
        self._rendezvous = rendezvous
        self._interceptor = interceptor

    def render(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        table, registry = self._rendezvous.table, self._registry
        leases = registry.leases(ENGINE_ROLE_UNSPECIFIED)
        per_role = {(role, healthy): 0 for role in ("prefill", "decode") for healthy in ("true", "false")}
        for lease in leases:
            role = EngineRole.Name(lease.engine.role).removeprefix("ENGINE_ROLE_").lower()
            serving = registry.health_of(lease.engine.engine_id) is EngineHealth.SERVING
            per_role[role, str(serving).lower()] += 1
        yield from _head("rd2h_meta_engines", "gauge", "Engines with a live lease.")
        for (role, serving_text), count in per_role.items():
            yield f'rd2h_meta_engines{{role="{role}",serving="{serving_text}"}} {count}'
        yield from _single("rd2h_meta_registry_revision", "counter", "Changes of the registry.", registry.revision)
        yield from _single("rd2h_meta_leases_expired_total", "counter", "Leases that ran out.", registry.expired_total)
        yield from _single("rd2h_meta_watches", "gauge", "Open registry and health watches.", registry.watcher_count)
        yield from _single("rd2h_meta_rendezvous_open", "gauge", "Rendezvous open now.", table.open_count)
        yield from _single(
            "rd2h_meta_rendezvous_remembered", "gauge", "Ended rendezvous remembered.", table.remembered_count
        )
        yield from _single("rd2h_meta_children_live", "gauge", "Children not ended.", table.live_children)
        yield from _single("rd2h_meta_waiters", "gauge", "Streams that await a rendezvous.", table.waiter_count)
        yield from _single(
            "rd2h_meta_exchange_streams", "gauge", "Open Exchange streams.", self._rendezvous.exchange_streams
        )
        yield from _single("rd2h_meta_advertised_total", "counter", "Children advertised.", table.stats.advertised)
        yield from _single(
            "rd2h_meta_operations_total", "counter", "Rendezvous operations.", self._rendezvous.operations_total
        )
        yield from _single(
            "rd2h_meta_slow_streams_total",
            "counter",
            "Streams ended because their client read too slowly.",
            self._rendezvous.overflowed_streams_total,
        )
        for name, counts in (("rendezvous", table.stats.rendezvous), ("children", table.stats.children)):
            yield from _head(f"rd2h_meta_{name}_ended_total", "counter", f"Ended {name} by outcome.")
            for outcome in _OUTCOMES:
                yield f'rd2h_meta_{name}_ended_total{{outcome="{outcome_name(outcome)}"}} {counts[outcome]}'
        refused = self._interceptor.refused_total if self._interceptor else 0
        yield from _single("rd2h_meta_unauthenticated_total", "counter", "Calls without the right token.", refused)


class MetricsEndpoint:
    """Serves GET /metrics over HTTP/1.1, one request per connection."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Bind and serve; return host:port."""
        # asyncio would serve IPv6 only on "::"; None means every address of both families.
        bind_to = None if host == "::" else host
        self._server = await asyncio.start_server(self._serve, bind_to, port, limit=_MAX_REQUEST_BYTES)
        return join_host_port(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop serving."""
        if self._server:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.split(b"\r\n", 1)[0]))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # the scraper went away or sent no request: there is nobody to answer
        finally:
            writer.close()

    def _answer(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if path != b"/metrics":
            return _response("404 Not Found", "only /metrics is here\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", "only GET is allowed\n")
        return _response("200 OK", self._source.render())


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _single(name: str, kind: str, text: str, value: int) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"{name} {value}"


def _response(status: str, body: str) -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data
