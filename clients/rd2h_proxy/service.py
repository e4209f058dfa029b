"""The running proxy: builds the parts, starts them, and takes them down in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from rd2h_client.addresses import AddressError, join_host_port
from rd2h_client.channels import OptionsError
from rd2h_client.client import MetaClient
from rd2h_client.errors import MetaError
from rd2h_client.options import ClientOptions, TlsOptions

from rd2h_proxy.app import make_app
from rd2h_proxy.background import Background
from rd2h_proxy.bound import Bound
from rd2h_proxy.completions import CompletionHandler
from rd2h_proxy.config import ProxyConfig
from rd2h_proxy.dispatcher import Dispatcher
from rd2h_proxy.engine_http import make_session
from rd2h_proxy.errors import ConfigError
from rd2h_proxy.journal import Journal
from rd2h_proxy.membership import EngineWatcher, Membership
from rd2h_proxy.meta_link import MetaLink, RendezvousApi
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.probe import Prober
from rd2h_proxy.router import Router
from rd2h_proxy.stall import StallGuard
from rd2h_proxy.target import Role, Target

log = logging.getLogger(__name__)

_DRAIN_S = 30.0
# After that, for telling the clients of requests that are not done.
_LAST_WORDS_S = 2.0
_CUT_S = 1.0
# A connection without a complete request, new or kept alive; longer than the 60 s of the usual reverse proxies.
_IDLE_CLIENT_S = 75.0


class MetaApi(RendezvousApi, EngineWatcher, Protocol):
    """Everything that the proxy asks of `rd2h_client.MetaClient`."""


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A proxy that is listening."""

    address: str
    """host:port, with the port that was really bound."""
    router: Router
    journal: Journal


async def serve(config: ProxyConfig, announce: Callable[[str], None]) -> None:
    """Runs the proxy until SIGTERM or SIGINT.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        client = MetaClient(config.meta_service, client_options(config))
    except (AddressError, OptionsError) as error:
        raise ConfigError(f"--meta-service: {error}") from error
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        # The proxy comes up without the service; until that answers, requests get 503 and health checks say so.
        client.start_connecting()
        proxy = await stack.enter_async_context(running(config, client))
        _run_beside(stack, _report_first_contact(client), "meta-first-contact")
        announce(f"rd2h proxy: serving on http://{proxy.address}")
        await stop.wait()
        log.info("stopping: no new connections, at most %g s for requests in flight", _DRAIN_S)


async def _report_first_contact(client: MetaClient) -> None:
    """Says once in the log whether the meta service accepts us; wrong credentials would show only per request."""
    try:
        stats = await client.stats()
    except MetaError as error:
        log.error("meta service %s: %s", client.target.url, error)
    else:
        log.info("meta service %s answers; %d rendezvous are open", client.target.url, stats.open)


@asynccontextmanager
async def running(config: ProxyConfig, client: MetaApi) -> AsyncIterator[RunningProxy]:
    """A proxy that listens while the context lasts.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    async with AsyncExitStack() as stack:
        router = await _build(config, client, stack)
        journal = Journal()
        guard = StallGuard(config.client_stall_s)
        _run_beside(stack, guard.run(), "stall-guard")
        completions = CompletionHandler(Dispatcher(router, config.serving), journal, guard)
        app = make_app(router, completions, journal, guard, config.max_body_bytes)

        async def drain(_app: web.Application) -> None:
            await router.drain.run(_DRAIN_S, _LAST_WORDS_S)

        app.on_shutdown.append(drain)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_IDLE_CLIENT_S,
            # For what is left when the drain is over: clients that do not read. aiohttp waits twice as long.
            shutdown_timeout=_CUT_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, config.host, config.port, backlog=1024).start()
        except (OSError, UnicodeError) as error:
            # UnicodeError: the resolver's word for a name that cannot exist.
            raise ConfigError(f"--host, --port: cannot listen on {config.host}:{config.port} ({error})") from error
        yield RunningProxy(join_host_port(config.host, runner.addresses[0][1]), router, journal)


async def _build(config: ProxyConfig, client: MetaApi, stack: AsyncExitStack) -> Router:
    """Makes what requests use. Everything registers its end on `stack`."""
    session = await stack.enter_async_context(make_session(config.stream_idle_s))
    prefill = EnginePool(Role.PREFILL, config.max_waiting, time.monotonic)
    decode = EnginePool(Role.DECODE, config.max_waiting, time.monotonic, depends_on=prefill)
    pools = {Role.PREFILL: prefill, Role.DECODE: decode}
    limits = {Role.PREFILL: config.prefill_limit, Role.DECODE: config.decode_limit}
    for role, addresses in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        for address in addresses:
            pools[role].add(Target(role, address, limits[role], static=True))
    membership = Membership(pools, limits, config.discover)
    meta = MetaLink(client, config.meta_outage_s)
    stack.push_async_callback(meta.close)
    background = Background()
    stack.push_async_callback(background.close, 5.0)
    router = Router(
        session=session,
        prefill=prefill,
        decode=decode,
        membership=membership,
        meta=meta,
        metaserver=config.meta_advertised,
        limits=config.attempt,
        background=background,
        bodies=Bound(config.max_bodies_bytes, "bytes of request bodies may be held at a time"),
        passing=Bound(config.max_passing, "requests may be passed through at a time"),
    )
    _run_beside(stack, Prober(session, (prefill, decode)).run(), "prober")
    _run_beside(stack, membership.run(client), "membership")
    return router


def _run_beside(stack: AsyncExitStack, work: Coroutine[Any, Any, None], name: str) -> None:
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_failure)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has broken; restart this proxy", task.get_name(), exc_info=error)


def client_options(config: ProxyConfig) -> ClientOptions:
    """Connection options for the meta service."""
    tls = None
    if config.meta_ca or config.meta_cert or config.meta_service.startswith("grpcs://"):
        tls = TlsOptions(
            ca_path=config.meta_ca,
            cert_path=config.meta_cert,
            key_path=config.meta_key,
            server_name_override=config.meta_server_name,
        )
    return ClientOptions(tls=tls, token=config.meta_token)
