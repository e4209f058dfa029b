"""HTTP health checks of the engines' servers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from rd2h_proxy.pool import EnginePool
from rd2h_proxy.target import ProbeState, Target

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """How often to ask and when to believe."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    silent_to_down: int = 5
    """Time-outs in a row that count as down. A refused connection or a 5xx counts at once."""
    silent_to_down_with_lease: int = 15
    """The same for an engine that renews its lease: it lives, and its HTTP server has much to do."""
    gone_after_s: float = 30.0
    """Down for so long, requests in flight are given up; sooner when the lease has ended as well."""


@dataclass(slots=True)
class _History:
    silent: int = 0
    down_since: float | None = None


class Prober:
    """Asks GET /health of every target of the pools."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pools: Sequence[EnginePool],
        options: ProbeOptions = ProbeOptions(),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._pools = pools
        self._options = options
        self._now = now
        self._histories: dict[tuple[str, str], _History] = {}

    async def run(self) -> None:
        """Probes until cancelled."""
        while True:
            await self.probe_all()
            # Several proxies must not probe in step.
            await asyncio.sleep(self._options.interval_s * random.uniform(0.8, 1.2))

    async def probe_all(self) -> None:
        """One round."""
        targets = [(pool, target) for pool in self._pools for target in pool.targets]
        known = {(target.role.value, target.address) for _, target in targets}
        self._histories = {key: history for key, history in self._histories.items() if key in known}
        await asyncio.gather(*(self._probe(pool, target) for pool, target in targets))

    async def _probe(self, pool: EnginePool, target: Target) -> None:
        history = self._histories.setdefault((target.role.value, target.address), _History())
        state = await self._ask(target, history)
        if state is not target.probe:
            level = logging.WARNING if state is ProbeState.DOWN else logging.INFO
            log.log(level, "%s engine %s: health check says %s", target.role.value, target.address, state.value)
            target.probe = state
            pool.wake()
        if state is not ProbeState.DOWN:
            history.down_since = None
            return
        now = self._now()
        if history.down_since is None:
            history.down_since = now
        lease_ended = target.was_registered and not target.engines
        if lease_ended or now - history.down_since >= self._options.gone_after_s:
            target.lost("it does not answer health checks" + (" and its lease has ended" if lease_ended else ""))

    async def _ask(self, target: Target, history: _History) -> ProbeState:
        timeout = aiohttp.ClientTimeout(total=self._options.timeout_s)
        try:
            async with self._session.get(target.url + "/health", timeout=timeout, allow_redirects=False) as response:
                history.silent = 0
                return ProbeState.DOWN if response.status >= 500 else ProbeState.UP
        except TimeoutError:
            history.silent += 1
            # A server that computes something long is slow, not dead.
            options = self._options
            patience = options.silent_to_down_with_lease if target.engines else options.silent_to_down
            return ProbeState.DOWN if history.silent >= patience else target.probe
        except (aiohttp.ClientError, OSError, ValueError):
            # ValueError: the resolver's word for a name that cannot exist.
            history.silent = 0
            return ProbeState.DOWN
