"""State machine over the registry: register, renew, expire, pause, restart, with watchers that resume.

Whatever the order, a watcher that applies what it is told knows exactly the engines that the model knows.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from meta_builders import decode, lease_ids
from rd2h_client.engine_watch import EngineWatch
from rd2h_client.v1.engine_registry_pb2 import (
    ENGINE_ROLE_UNSPECIFIED,
    Engine,
    EngineEvent,
    Load,
    WatchEnginesResponse,
)
from rd2h_meta.errors import LimitError, PreconditionError, RevisionGoneError, UnknownError
from rd2h_meta.limits import RegistryLimits
from rd2h_meta.registry import EngineRegistry
from rd2h_meta.watchers import Watcher

LIMITS = RegistryLimits(max_engines=2, history_events=6, watcher_queue_events=5, grace_s=5.0, default_ttl_s=10.0)
TTL_S = 10.0
ENGINES = st.sampled_from(["d0", "d1", "d2"])


class RegistryMachine(RuleBasedStateMachine):
    """A registry, a model of it, and one watcher that now and then loses its stream."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.runs = 0
        self.names = lease_ids()
        self.generations: dict[str, int] = {}
        self.told: dict[str, int] = {}
        self.watch = EngineWatch(ENGINE_ROLE_UNSPECIFIED)
        self.watcher: Watcher | None = None
        self.start_service()

    def start_service(self) -> None:
        self.runs += 1
        self.service_id = f"run-{self.runs}"
        self.registry = EngineRegistry(self.service_id, LIMITS, self.now_s, lambda: next(self.names))
        self.live: dict[str, tuple[int, float, str]] = {}  # engine id: generation, deadline, lease
        self.fenced: set[tuple[str, int]] = set()
        self.grace_until_s = self.now_s + LIMITS.grace_s
        self.watcher = None

    @rule(engine_id=ENGINES, restarted=st.booleans())
    def register(self, engine_id: str, restarted: bool) -> None:
        if restarted or engine_id not in self.generations:
            self.generations[engine_id] = self.generations.get(engine_id, 0) + 1
        generation = self.generations[engine_id]
        room = engine_id in self.live or len(self.live) < LIMITS.max_engines
        try:
            grant = self.registry.register(decode(engine_id, generation), 0.0, self.now_s)
        except LimitError:
            assert not room
            return
        assert room
        if engine_id in self.live and self.live[engine_id][0] != generation:
            self.fenced.add((engine_id, self.live[engine_id][0]))
        self.live[engine_id] = (generation, self.now_s + TTL_S, grant.lease_id)

    @rule(engine_id=ENGINES, times=st.integers(2, 4))
    def an_engine_restarts_again_and_again(self, engine_id: str, times: int) -> None:
        for _ in range(times):
            self.register(engine_id, True)

    @rule(engine_id=ENGINES)
    def an_old_process_comes_late(self, engine_id: str) -> None:
        generation = self.generations.get(engine_id, 0) - 1
        if generation < 1 or engine_id not in self.live:
            return
        before = self.live[engine_id]
        fenced = (engine_id, generation) in self.fenced
        try:
            grant = self.registry.register(decode(engine_id, generation), 0.0, self.now_s)
        except PreconditionError:
            assert fenced
            assert self.live[engine_id] == before
        else:
            assert not fenced  # a restarted service cannot know; then the latest wins
            if before[0] != generation:
                self.fenced.add((engine_id, before[0]))
            self.live[engine_id] = (generation, self.now_s + TTL_S, grant.lease_id)
            self.generations[engine_id] += 1

    @rule(engine_id=ENGINES, running=st.integers(0, 3))
    def renew(self, engine_id: str, running: int) -> None:
        generation, _, lease_id = self.live.get(engine_id, (0, 0.0, "unknown"))
        try:
            self.registry.keep_alive(lease_id, 0, Load(running_requests=running), None, self.now_s)
        except UnknownError:
            assert engine_id not in self.live
        else:
            self.live[engine_id] = (generation, self.now_s + TTL_S, lease_id)

    @rule(engine_id=ENGINES)
    def deregister(self, engine_id: str) -> None:
        if engine_id in self.live:
            self.registry.deregister(self.live.pop(engine_id)[2])

    @rule(seconds=st.sampled_from([0.5, 4.0, 7.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        due = [engine_id for engine_id, (_, deadline_s, _) in self.live.items() if deadline_s <= self.now_s]
        assert self.registry.expire(self.now_s) == len(due)
        for engine_id in due:
            del self.live[engine_id]

    @rule(seconds=st.floats(1.0, 100.0))
    def the_service_is_paused(self, seconds: float) -> None:
        self.now_s += seconds
        self.registry.shift_deadlines(seconds)
        self.grace_until_s += seconds
        self.live = {name: (gen, deadline_s + seconds, lease) for name, (gen, deadline_s, lease) in self.live.items()}

    @rule()
    def the_service_restarts(self) -> None:
        self.start_service()

    @precondition(lambda self: self.watcher is not None)
    @rule()
    def the_watch_is_lost(self) -> None:
        self.registry.unwatch(self.watcher)
        self.watcher = None

    @rule()
    def the_watcher_catches_up(self) -> None:
        known, restarted = set(self.told), self.watch._service_id != self.service_id
        self.catch_up()
        if restarted and self.now_s < self.grace_until_s:
            assert known <= self.told.keys()  # nobody is lost because the service restarted
        expected = {name: generation for name, (generation, _, _) in self.live.items()}
        if self.watch.absent_until_s <= self.now_s:
            self.apply(self.watch.give_up_absent().events)
        if self.watch.absent_until_s == float("inf"):
            assert self.told == expected
        else:  # in the grace period some may be kept that have not yet returned
            assert expected.items() <= self.told.items()

    def catch_up(self) -> None:
        if self.watcher is not None and not self.watcher.overflowed:
            self.receive(self.watcher.take(100))
            return
        if self.watcher is not None:
            self.registry.unwatch(self.watcher)
            self.watch.list_again()
        request = self.watch.request()
        self.watcher = self.registry.watch(ENGINE_ROLE_UNSPECIFIED, lambda: None)
        if request.service_id:
            try:
                self.receive(self.registry.changes_after(request.after_revision, request.service_id, 0))
                return
            except RevisionGoneError:
                self.watch.list_again()
        leases = self.registry.leases(ENGINE_ROLE_UNSPECIFIED)
        self.receive([EngineEvent(kind=EngineEvent.KIND_ADDED, engine=lease.engine) for lease in leases], True)

    def receive(self, events: list[EngineEvent], snapshot: bool = False) -> None:
        message = WatchEnginesResponse(
            events=events,
            snapshot=snapshot,
            revision=self.registry.revision,
            service_id=self.service_id,
            grace_remaining_ms=round(self.registry.grace_remaining_s(self.now_s) * 1000),
        )
        batch = self.watch.receive(message, self.now_s)
        if batch is not None:
            if batch.snapshot:
                self.told = {}
            self.apply(batch.events)

    def apply(self, events: list[EngineEvent]) -> None:
        for event in events:
            engine: Engine = event.engine
            if event.kind == EngineEvent.KIND_REMOVED:
                assert self.told.pop(engine.engine_id) == engine.generation
            else:
                self.told[engine.engine_id] = engine.generation

    @invariant()
    def registry_and_model_agree(self) -> None:
        leases = {lease.engine.engine_id: lease for lease in self.registry.leases(ENGINE_ROLE_UNSPECIFIED)}
        assert {name: lease.engine.generation for name, lease in leases.items()} == {
            name: generation for name, (generation, _, _) in self.live.items()
        }
        assert self.registry.watcher_count <= 1


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
