"""The engine registry: leases, generations, ordered changes. Pure: time comes in, nothing blocks, no gRPC."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rd2h_client.v1.engine_registry_pb2 import (
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_PREFILL,
    ENGINE_STATE_SERVING,
    ENGINE_STATE_STARTING,
    ENGINE_STATE_UNSPECIFIED,
    DataPathHealth,
    Engine,
    EngineEvent,
    EngineRole,
    EngineState,
    Load,
)

from rd2h_meta import validation
from rd2h_meta.compatibility import check_compatible
from rd2h_meta.errors import (
    InvalidFieldError,
    LimitError,
    NotYetError,
    PreconditionError,
    RevisionGoneError,
    UnknownError,
)
from rd2h_meta.expiry import ExpiryQueue
from rd2h_meta.limits import RegistryLimits
from rd2h_meta.watchers import History, Watcher, role_matches


class EngineHealth(enum.Enum):
    """What the health service says of an engine."""

    SERVING = "serving"
    """Live lease, state SERVING, data path healthy."""
    NOT_SERVING = "not serving"
    """Known, but one of the three is missing."""
    UNKNOWN = "unknown"
    """Never seen, or gone for long."""


@dataclass
class EngineLease:
    """A registered engine with its lease."""

    lease_id: str
    engine: Engine
    ttl_s: float
    deadline_s: float
    since_s: float
    """When this generation registered here first."""


@dataclass(frozen=True)
class Grant:
    """Answer to a registration."""

    lease_id: str
    ttl_s: float
    revision: int


class EngineRegistry:
    """All engines with a live lease. Every method that takes `now_s` expects one monotonic clock, in seconds."""

    def __init__(self, service_id: str, limits: RegistryLimits, now_s: float, new_lease_id: Callable[[], str]) -> None:
        """`service_id` names this run of the service; `new_lease_id` returns unguessable names."""
        self.service_id = service_id
        self._limits = limits
        self._new_lease_id = new_lease_id
        self._grace_until_s = now_s + limits.grace_s
        self._by_engine_id: dict[str, EngineLease] = {}
        self._by_lease_id: dict[str, EngineLease] = {}
        self._expiry: ExpiryQueue[str] = ExpiryQueue()
        self._history = History(limits.history_events)
        self._watchers: set[Watcher] = set()
        self._observers: dict[int, Callable[[], None]] = {}
        self._last_observer = 0
        self._fenced: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._removed: OrderedDict[str, None] = OrderedDict()
        self.expired_total = 0
        """Leases that ran out since the start."""

    @property
    def revision(self) -> int:
        """Revision of the newest change."""
        return self._history.revision

    def register(self, engine: Engine, requested_ttl_s: float, now_s: float) -> Grant:
        """Register an engine, or renew and update its registration. The registry keeps `engine` itself.

        Raises:
            InvalidFieldError: a field is malformed.
            PreconditionError: this generation was replaced by another one.
            LimitError: the registry is full.
        """
        validation.check_engine(engine, self._limits.max_layers)
        self._normalise(engine)
        successor = self._fenced.get((engine.engine_id, engine.generation))
        if successor is not None:
            raise PreconditionError(
                f"engine.generation: {engine.generation} of engine {engine.engine_id!r} was replaced by generation "
                f"{successor}; an engine process must not come back after its successor has registered"
            )
        ttl_s = self._clamp_ttl_s(requested_ttl_s)
        lease = self._by_engine_id.get(engine.engine_id)
        if lease is None:
            if len(self._by_engine_id) >= self._limits.max_engines:
                raise LimitError(f"{self._limits.max_engines} engines are registered", self._limits.retry_after_s)
            return self._add(engine, ttl_s, now_s)
        if lease.engine.generation != engine.generation:
            self._fence(engine.engine_id, lease.engine.generation, engine.generation)
            self._remove(lease, EngineEvent.REASON_REPLACED)
            return self._add(engine, ttl_s, now_s)
        if lease.engine.role != engine.role:
            raise InvalidFieldError("engine.role", engine.role, f"{lease.engine.role}, as registered before")
        for name in ("load", "health"):
            # A registration that does not tell load or health leaves them as they were, like KeepAlive.
            if not engine.HasField(name) and lease.engine.HasField(name):
                getattr(engine, name).CopyFrom(getattr(lease.engine, name))
        lease.ttl_s = ttl_s
        self._renew(lease, now_s)
        if engine != lease.engine:
            lease.engine = engine
            self._publish(EngineEvent.KIND_UPDATED, engine)
        return Grant(lease.lease_id, ttl_s, self.revision)

    def keep_alive(
        self, lease_id: str, state: EngineState, load: Load | None, health: DataPathHealth | None, now_s: float
    ) -> float:
        """Renew a lease and take over what it reports; None and UNSPECIFIED leave things as they were.

        Returns:
            Lease time in seconds from now.

        Raises:
            UnknownError: the lease is not known here.
            InvalidFieldError: a field is malformed.
        """
        lease = self._by_lease_id.get(lease_id)
        if lease is None:
            raise UnknownError("lease_id: not known here (expired, replaced, or the service restarted); register again")
        if state not in EngineState.values():
            raise InvalidFieldError("state", state, "an EngineState, 0 to 3")
        updated = Engine()
        updated.CopyFrom(lease.engine)
        if state != ENGINE_STATE_UNSPECIFIED:
            updated.state = state
        if load is not None:
            updated.load.CopyFrom(load)
        if health is not None:
            updated.health.CopyFrom(health)
            validation.clean_health(updated.health)
        validation.check_engine_size(updated)
        self._renew(lease, now_s)
        if updated != lease.engine:
            lease.engine = updated
            self._publish(EngineEvent.KIND_UPDATED, updated)
        return lease.ttl_s

    def deregister(self, lease_id: str) -> None:
        """End a lease at once; unknown leases are fine."""
        lease = self._by_lease_id.get(lease_id)
        if lease is not None:
            self._remove(lease, EngineEvent.REASON_DEREGISTERED)

    def expire(self, now_s: float) -> int:
        """End the leases that have run out by `now_s`; return how many."""
        due = self._expiry.pop_due(now_s)
        for lease_id in due:
            self.expired_total += 1
            self._remove(self._by_lease_id[lease_id], EngineEvent.REASON_EXPIRED)
        return len(due)

    def shift_deadlines(self, delta_s: float) -> None:
        """Move all deadlines: the service itself did not run for `delta_s`, so nobody could renew."""
        self._expiry.shift(delta_s)
        self._grace_until_s += delta_s
        for lease in self._by_lease_id.values():
            lease.deadline_s += delta_s

    def leases(self, role: EngineRole) -> list[EngineLease]:
        """Return the live leases of `role` (UNSPECIFIED: all), by engine id."""
        leases = (lease for lease in self._by_engine_id.values() if role_matches(role, lease.engine.role))
        return sorted(leases, key=lambda lease: lease.engine.engine_id)

    def grace_remaining_s(self, now_s: float) -> float:
        """Return for how long absent engines are still taken for not yet returned; 0 when that is over."""
        return max(0.0, self._grace_until_s - now_s)

    def watch(self, role: EngineRole, wake: Callable[[], None]) -> Watcher:
        """Start a watch at the present revision. Call `unwatch` when done.

        Raises:
            LimitError: too many watches are open.
        """
        if len(self._watchers) >= self._limits.max_watchers:
            raise LimitError(f"{self._limits.max_watchers} watches are open", self._limits.retry_after_s)
        watcher = Watcher(role, self._limits.watcher_queue_events, wake)
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """End a watch."""
        self._watchers.discard(watcher)

    def observe(self, wake: Callable[[], None]) -> int:
        """Have `wake` called after every change; it must not block. Returns a number for `unobserve`.

        Raises:
            LimitError: too many observe. They have a limit of their own: health may be watched without credentials,
                which must not take the places of registry watches.
        """
        if len(self._observers) >= self._limits.max_health_watches:
            raise LimitError(f"{self._limits.max_health_watches} health watches are open", self._limits.retry_after_s)
        self._last_observer += 1
        self._observers[self._last_observer] = wake
        return self._last_observer

    def unobserve(self, observer: int) -> None:
        """End what `observe` began."""
        self._observers.pop(observer, None)

    def changes_after(self, revision: int, service_id: str, role: EngineRole) -> list[EngineEvent]:
        """Return what a watcher missed since `revision`.

        Raises:
            RevisionGoneError: the revision belongs to another run of the service, or is no longer kept.
        """
        if service_id != self.service_id:
            raise RevisionGoneError("service_id: another run of the service; list again")
        return list(self._history.after(revision, role))

    @property
    def watcher_count(self) -> int:
        """Open watches, those of health included."""
        return len(self._watchers) + len(self._observers)

    def health_of(self, engine_id: str) -> EngineHealth:
        """Return the health of an engine: its lease, its state and its data path together."""
        lease = self._by_engine_id.get(engine_id)
        if lease is None:
            return EngineHealth.NOT_SERVING if engine_id in self._removed else EngineHealth.UNKNOWN
        engine = lease.engine
        path_ok = not engine.HasField("health") or engine.health.ok
        serving = path_ok and engine.state == ENGINE_STATE_SERVING
        return EngineHealth.SERVING if serving else EngineHealth.NOT_SERVING

    def check_compatibility(self, prefill_engine_id: str, decode_engine_id: str, now_s: float) -> None:
        """Compare two registered engines.

        Raises:
            UnknownError, NotYetError: an engine is not (yet) registered, or its layout is not yet known.
            InvalidFieldError: an engine has the other role.
            IncompatibleError: naming the first field that differs and both values.
        """
        prefill = self._engine_for_check("prefill_engine_id", prefill_engine_id, ENGINE_ROLE_PREFILL, now_s)
        decode = self._engine_for_check("decode_engine_id", decode_engine_id, ENGINE_ROLE_DECODE, now_s)
        check_compatible(prefill, decode)

    def _engine_for_check(self, field: str, engine_id: str, role: EngineRole, now_s: float) -> Engine:
        validation.check_text(field, engine_id, validation.MAX_ENGINE_ID_BYTES)
        lease = self._by_engine_id.get(engine_id)
        if lease is None:
            if self.grace_remaining_s(now_s) > 0:
                raise NotYetError(f"{field}: {engine_id!r} is not registered, and the service has just started; retry")
            raise UnknownError(f"{field}: {engine_id!r} is not registered")
        if lease.engine.role != role:
            raise InvalidFieldError(field, engine_id, f"an engine of role {role}; this one has {lease.engine.role}")
        if not lease.engine.HasField("layout"):
            raise NotYetError(f"{field}: {engine_id!r} has not yet told its KV cache layout; retry")
        return lease.engine

    def _add(self, engine: Engine, ttl_s: float, now_s: float) -> Grant:
        lease = EngineLease(self._new_lease_id(), engine, ttl_s, now_s + ttl_s, now_s)
        self._by_engine_id[engine.engine_id] = lease
        self._by_lease_id[lease.lease_id] = lease
        self._removed.pop(engine.engine_id, None)
        self._renew(lease, now_s)
        self._publish(EngineEvent.KIND_ADDED, engine)
        return Grant(lease.lease_id, ttl_s, self.revision)

    def _renew(self, lease: EngineLease, now_s: float) -> None:
        lease.deadline_s = now_s + lease.ttl_s
        self._expiry.set(lease.lease_id, lease.deadline_s)

    def _remove(self, lease: EngineLease, reason: EngineEvent.Reason) -> None:
        engine = lease.engine
        del self._by_lease_id[lease.lease_id]
        del self._by_engine_id[engine.engine_id]
        self._expiry.discard(lease.lease_id)
        self._removed[engine.engine_id] = None
        if len(self._removed) > self._limits.removed_memory:
            self._removed.popitem(last=False)
        self._publish(EngineEvent.KIND_REMOVED, engine, reason)

    def _fence(self, engine_id: str, old_generation: int, new_generation: int) -> None:
        """Bar the replaced process from coming back: two processes of one name must not replace each other for ever."""
        self._fenced[(engine_id, old_generation)] = new_generation
        if len(self._fenced) > self._limits.removed_memory:
            self._fenced.popitem(last=False)

    def _publish(
        self,
        kind: EngineEvent.Kind,
        engine: Engine,
        reason: EngineEvent.Reason = EngineEvent.REASON_UNSPECIFIED,
    ) -> None:
        event = EngineEvent(kind=kind, engine=engine, reason=reason, revision=self.revision + 1)
        self._history.append(event)
        for watcher in tuple(self._watchers):
            watcher.offer(event)
        for wake in self._observers.values():
            wake()

    def _clamp_ttl_s(self, requested_ttl_s: float) -> float:
        wished = requested_ttl_s or self._limits.default_ttl_s
        return min(max(wished, self._limits.min_ttl_s), self._limits.max_ttl_s)

    @staticmethod
    def _normalise(engine: Engine) -> None:
        """Fill in what absence means, so that watchers and comparisons see one form."""
        if engine.state == ENGINE_STATE_UNSPECIFIED:
            engine.state = ENGINE_STATE_STARTING
        if engine.dp_size == 0:
            engine.dp_size = 1
