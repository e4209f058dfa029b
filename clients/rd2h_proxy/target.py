"""One engine deployment as the proxy sees it: an HTTP address, and what is known about the engines behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from rd2h_client.v1.engine_registry_pb2 import Engine, EngineRole, EngineState

from rd2h_proxy.breaker import Breaker, BreakerOptions


class Role(Enum):
    """Which leg a target serves."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def proto(self) -> EngineRole:
        """The registry's name of the role."""
        return EngineRole.ENGINE_ROLE_PREFILL if self is Role.PREFILL else EngineRole.ENGINE_ROLE_DECODE


class ProbeState(Enum):
    """Result of the HTTP health probe."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class Target:
    """An OpenAI server with one role. Several registered engines (data-parallel ranks) may be behind it."""

    role: Role
    address: str
    """host:port; IPv6 literals in brackets. Unique within the role."""
    limit: int
    """Most requests in flight from this proxy."""
    breaker: Breaker = field(default_factory=lambda: Breaker(BreakerOptions()))
    static: bool = False
    """Named on the command line, so it stays when the registry does not know it."""
    probe: ProbeState = ProbeState.UNKNOWN
    engines: dict[str, Engine] = field(default_factory=dict)
    """Registered engines by engine id."""
    was_registered: bool = False
    in_flight: int = 0
    work_tokens: int = 0
    """Estimated tokens of the requests in flight."""
    chosen_at: int = 0
    """Counter value of the last choice; breaks ties so that equal targets take turns."""
    _on_lost: list[Callable[[str], None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.address}"

    def unusable_reason(self, now: float) -> str | None:
        """Why no new request may go here; None when one may (apart from the limit)."""
        if self.probe is ProbeState.DOWN:
            return "its HTTP health check fails"
        if not self.breaker.allows(now):
            return f"its circuit breaker is {self.breaker.state.value}"
        return self._registry_reason()

    def _registry_reason(self) -> str | None:
        if not self.engines:
            if self.was_registered:
                return "its lease has ended"
            return None if self.static else "it is not registered"
        for engine in self.engines.values():
            # One bad rank spoils the address: the engine's own balancer may send any request there.
            if engine.HasField("health") and not engine.health.ok:
                return f"data path of {engine.engine_id} is not healthy: {engine.health.reason or 'no reason given'}"
            if engine.state == EngineState.ENGINE_STATE_DRAINING:
                return f"{engine.engine_id} is draining"
            if engine.state != EngineState.ENGINE_STATE_SERVING:
                return f"{engine.engine_id} is starting"
        return None

    def lacks_kv_room(self, tokens: int) -> bool:
        """Whether the engines report less free KV than `tokens`. Unknown counts as room enough."""
        return any(
            engine.load.total_kv_tokens > 0 and engine.load.free_kv_tokens < tokens for engine in self.engines.values()
        )

    def has_room(self) -> bool:
        """Whether the concurrency limit lets one more request in."""
        return self.in_flight < self.limit

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls back once with a reason when the target is known to be gone. Returns the way to stop watching."""
        self._on_lost.append(callback)

        def stop() -> None:
            if callback in self._on_lost:
                self._on_lost.remove(callback)

        return stop

    def lost(self, reason: str) -> None:
        """Tells everyone whose request is on this target that no answer will come."""
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            callback(reason)


def pair_conflict(prefill: Target, decode: Target) -> tuple[str, str] | None:
    """Engine ids of a Prefill and a Decode engine that do not fit together; None when nothing speaks against.

    Compares the layouts' fingerprints and the tensor-parallel sizes. Engines that have not told their layout are
    given the benefit of the doubt: their connectors check it as well.
    """
    for p_engine in prefill.engines.values():
        for d_engine in decode.engines.values():
            if not _fit(p_engine, d_engine):
                return p_engine.engine_id, d_engine.engine_id
    return None


def _fit(prefill: Engine, decode: Engine) -> bool:
    p_print, d_print = prefill.layout.fingerprint, decode.layout.fingerprint
    if p_print and d_print and p_print != d_print:
        return False
    return decode.tp_size == 0 or (prefill.tp_size >= decode.tp_size and prefill.tp_size % decode.tp_size == 0)
