"""Engines that join, change, drain and leave at run time, as the registry of the meta service tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rd2h_client.engine_watch import EngineBatch
from rd2h_client.v1.engine_registry_pb2 import ENGINE_ROLE_UNSPECIFIED, Engine, EngineEvent, EngineRole

from rd2h_proxy.meta_link import META_TROUBLE
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.target import Role, Target

log = logging.getLogger(__name__)

_WATCH_AGAIN_S = 5.0
_ROLES = {EngineRole.ENGINE_ROLE_PREFILL: Role.PREFILL, EngineRole.ENGINE_ROLE_DECODE: Role.DECODE}


class EngineWatcher(Protocol):
    """The part of `rd2h_client.MetaClient` that membership uses."""

    def watch_engines(self, role: EngineRole = ...) -> AsyncIterator[EngineBatch]:
        """A snapshot and then changes, for ever."""


@dataclass(frozen=True, slots=True)
class _Place:
    role: Role
    address: str


class Membership:
    """Keeps the pools in step with the registry.

    An engine belongs to the target with its HTTP address. One that does not tell its address is matched to a target
    by the adverts that come from it (`learn`). With `discover`, an address that is not known yet becomes a target.
    """

    def __init__(self, pools: Mapping[Role, EnginePool], limits: Mapping[Role, int], discover: bool) -> None:
        self._pools = pools
        self._limits = limits
        self._discover = discover
        self._known: dict[str, Engine] = {}
        self._places: dict[str, _Place] = {}
        self._learned: dict[str, str] = {}

    async def run(self, watcher: EngineWatcher) -> None:
        """Follows the registry until cancelled. A refusal is logged as an error once, not each time it comes again."""
        refusal = ""
        while True:
            try:
                async for batch in watcher.watch_engines(ENGINE_ROLE_UNSPECIFIED):
                    self.apply(batch)
                    refusal = ""
            except META_TROUBLE as error:
                level, refusal = logging.DEBUG if str(error) == refusal else logging.ERROR, str(error)
                log.log(level, "the registry cannot be watched: %s", error)
            await asyncio.sleep(_WATCH_AGAIN_S)

    def apply(self, batch: EngineBatch) -> None:
        """Takes over one batch."""
        if batch.snapshot:
            present = {event.engine.engine_id for event in batch.events}
            for engine_id in [engine_id for engine_id in self._known if engine_id not in present]:
                self._removed(self._known[engine_id], EngineEvent.REASON_EXPIRED)
        for event in batch.events:
            if event.kind == EngineEvent.KIND_REMOVED:
                self._removed(event.engine, event.reason)
            else:
                self._present(event.engine)
        self._prune()
        for pool in self._pools.values():
            pool.wake()

    def learn(self, engine_id: str, address: str) -> None:
        """A Decode engine has advertised for a request that was sent to `address`."""
        if engine_id in self._places or self._learned.get(engine_id) == address:
            return
        engine = self._known.get(engine_id)
        if engine is None or engine.http_address:
            return
        self._learned[engine_id] = address
        self._present(engine)

    def _present(self, engine: Engine) -> None:
        role = _ROLES.get(engine.role)
        if role is None:
            log.warning("engine %s has no role known here (%d); ignored", engine.engine_id, engine.role)
            return
        previous = self._known.get(engine.engine_id)
        if previous is not None and previous.generation != engine.generation:
            # A snapshot, or another run of the meta service, does not tell of the replacement itself.
            self._removed(previous, EngineEvent.REASON_REPLACED)
            previous = None
        self._known[engine.engine_id] = engine
        address = engine.http_address or self._learned.get(engine.engine_id, "")
        place = _Place(role, address)
        if self._places.get(engine.engine_id) not in (None, place):
            self._detach(engine.engine_id)
        if not address:
            return
        target = self._pools[role].get(address)
        if target is None:
            if not self._discover:
                return
            target = Target(role, address, self._limits[role])
            self._pools[role].add(target)
        target.engines[engine.engine_id] = engine
        target.was_registered = True
        self._places[engine.engine_id] = place
        if previous is None:
            log.info("%s engine %s (%s) has joined", role.value, engine.engine_id, address)

    def _removed(self, engine: Engine, reason: EngineEvent.Reason) -> None:
        known = self._known.get(engine.engine_id)
        if known is None or known.generation != engine.generation:
            return
        del self._known[engine.engine_id]
        self._learned.pop(engine.engine_id, None)
        target = self._detach(engine.engine_id)
        name = EngineEvent.Reason.Name(reason).removeprefix("REASON_").lower()
        log.info("engine %s has left (%s)", engine.engine_id, name)
        if target is not None and reason == EngineEvent.REASON_REPLACED:
            # The process that held the requests is gone, whatever its old connections look like.
            target.lost(f"engine {engine.engine_id} was restarted")

    def _detach(self, engine_id: str) -> Target | None:
        place = self._places.pop(engine_id, None)
        if place is None:
            return None
        target = self._pools[place.role].get(place.address)
        if target is not None:
            target.engines.pop(engine_id, None)
        return target

    def _prune(self) -> None:
        for pool in self._pools.values():
            for target in list(pool.targets):
                pool.forget_if_gone(target)
