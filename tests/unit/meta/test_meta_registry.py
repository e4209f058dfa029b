"""The registry core: leases, generations, changes in order. Cases R2, R6, R9, R10, R11."""

from collections.abc import Callable

import pytest
from meta_builders import decode, layout, lease_ids, prefill
from rd2h_client.v1.engine_registry_pb2 import (
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_PREFILL,
    ENGINE_ROLE_UNSPECIFIED,
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_SERVING,
    ENGINE_STATE_STARTING,
    ENGINE_STATE_UNSPECIFIED,
    DataPathHealth,
    EngineEvent,
    Load,
)
from rd2h_meta.compatibility import IncompatibleError
from rd2h_meta.errors import (
    InvalidFieldError,
    LimitError,
    NotYetError,
    PreconditionError,
    RevisionGoneError,
    UnknownError,
)
from rd2h_meta.limits import RegistryLimits
from rd2h_meta.registry import EngineHealth, EngineRegistry
from rd2h_meta.watchers import Watcher


def make(limits: RegistryLimits = RegistryLimits(grace_s=0.0), now_s: float = 0.0) -> EngineRegistry:  # noqa: B008
    names = lease_ids()
    return EngineRegistry("run-1", limits, now_s, lambda: next(names))


def watch(registry: EngineRegistry, role: int = ENGINE_ROLE_UNSPECIFIED) -> Watcher:
    return registry.watch(role, lambda: None)


def story(watcher: Watcher) -> list[str]:
    """What a watcher saw, in short words."""
    lines = []
    for event in watcher.take(1_000):
        words = [EngineEvent.Kind.Name(event.kind).removeprefix("KIND_"), event.engine.engine_id]
        words.append(str(event.engine.generation))
        if event.reason:
            words.append(EngineEvent.Reason.Name(event.reason).removeprefix("REASON_"))
        lines.append(" ".join(words))
    return lines


class TestRegister:
    def test_first_registration_is_an_addition(self) -> None:
        registry = make()
        watcher = watch(registry)
        grant = registry.register(decode(), 0.0, 10.0)
        assert (grant.ttl_s, grant.revision) == (15.0, 1)
        assert story(watcher) == ["ADDED d0 1"]

    def test_a_retry_is_never_refused_and_changes_nothing(self) -> None:
        registry = make()
        first = registry.register(decode(), 0.0, 0.0)
        watcher = watch(registry)
        for _ in range(5):
            assert registry.register(decode(), 0.0, 0.0) == first
        assert story(watcher) == []

    def test_changed_facts_are_one_update(self) -> None:
        registry = make()
        registry.register(decode(layout=None), 0.0, 0.0)
        watcher = watch(registry)
        registry.register(decode(), 0.0, 0.0)
        assert story(watcher) == ["UPDATED d0 1"]

    def test_a_registration_without_load_and_health_keeps_them(self) -> None:
        registry = make()
        grant = registry.register(decode(), 0.0, 0.0)
        registry.keep_alive(grant.lease_id, 0, Load(running_requests=3), DataPathHealth(ok=True), 0.0)
        registry.register(decode(), 0.0, 0.0)
        engine = registry.leases(ENGINE_ROLE_UNSPECIFIED)[0].engine
        assert engine.load.running_requests == 3
        assert engine.health.ok

    def test_new_generation_replaces_the_old_and_watchers_see_both_in_order(self) -> None:
        registry = make()
        old = registry.register(decode(generation=1), 0.0, 0.0)
        watcher = watch(registry)
        new = registry.register(decode(generation=2), 0.0, 0.0)
        assert story(watcher) == ["REMOVED d0 1 REPLACED", "ADDED d0 2"]
        assert new.lease_id != old.lease_id
        with pytest.raises(UnknownError):
            registry.keep_alive(old.lease_id, 0, None, None, 0.0)

    def test_latest_wins_also_with_a_smaller_number(self) -> None:
        registry = make()
        registry.register(decode(generation=9), 0.0, 0.0)
        registry.register(decode(generation=2), 0.0, 0.0)
        assert registry.leases(ENGINE_ROLE_DECODE)[0].engine.generation == 2

    def test_a_replaced_process_does_not_come_back(self) -> None:
        registry = make()
        registry.register(decode(generation=1), 0.0, 0.0)
        registry.register(decode(generation=2), 0.0, 0.0)
        with pytest.raises(PreconditionError, match=r"generation: 1 of engine 'd0' was replaced by generation 2"):
            registry.register(decode(generation=1), 0.0, 0.0)
        assert registry.leases(ENGINE_ROLE_DECODE)[0].engine.generation == 2

    def test_replaced_generations_are_remembered_within_bounds(self) -> None:
        registry = make(RegistryLimits(grace_s=0.0, removed_memory=3))
        for generation in range(1, 8):
            registry.register(decode(generation=generation), 0.0, 0.0)
        assert len(registry._fenced) == 3
        with pytest.raises(PreconditionError):
            registry.register(decode(generation=6), 0.0, 0.0)

    def test_the_role_cannot_change_within_a_generation(self) -> None:
        registry = make()
        registry.register(decode(), 0.0, 0.0)
        with pytest.raises(InvalidFieldError, match=r"engine\.role"):
            registry.register(prefill("d0"), 0.0, 0.0)

    def test_full_registry_says_when_to_retry(self) -> None:
        registry = make(RegistryLimits(max_engines=1, retry_after_s=2.5))
        registry.register(decode("d0"), 0.0, 0.0)
        with pytest.raises(LimitError, match="1 engines are registered") as refused:
            registry.register(decode("d1"), 0.0, 0.0)
        assert refused.value.retry_after_s == 2.5
        registry.register(decode("d0", generation=2), 0.0, 0.0)

    @pytest.mark.parametrize(("wished_s", "granted_s"), [(0.0, 15.0), (0.001, 1.0), (30.0, 30.0), (9_999.0, 120.0)])
    def test_lease_time_is_clamped(self, wished_s: float, granted_s: float) -> None:
        assert make().register(decode(), wished_s, 0.0).ttl_s == granted_s

    def test_absent_values_get_their_meaning(self) -> None:
        registry = make()
        registry.register(decode(state=ENGINE_STATE_UNSPECIFIED, dp_size=0), 0.0, 0.0)
        engine = registry.leases(ENGINE_ROLE_DECODE)[0].engine
        assert (engine.state, engine.dp_size) == (ENGINE_STATE_STARTING, 1)


class TestKeepAlive:
    def test_reports_state_load_and_health(self) -> None:
        registry = make()
        grant = registry.register(decode(state=ENGINE_STATE_STARTING), 0.0, 0.0)
        watcher = watch(registry)
        load, health = Load(running_requests=2), DataPathHealth(ok=False, reason="reader\ndied")
        assert registry.keep_alive(grant.lease_id, ENGINE_STATE_SERVING, load, health, 1.0) == 15.0
        engine = registry.leases(ENGINE_ROLE_DECODE)[0].engine
        assert engine.load == load
        assert engine.health.reason == "reader died"
        assert engine.state == ENGINE_STATE_SERVING
        assert story(watcher) == ["UPDATED d0 1"]

    def test_without_news_no_event(self) -> None:
        registry = make()
        grant = registry.register(decode(), 0.0, 0.0)
        watcher = watch(registry)
        registry.keep_alive(grant.lease_id, ENGINE_STATE_UNSPECIFIED, None, None, 1.0)
        assert story(watcher) == []

    def test_events_already_sent_do_not_change_under_the_watcher(self) -> None:
        registry = make()
        grant = registry.register(decode(), 0.0, 0.0)
        before = registry.leases(ENGINE_ROLE_DECODE)[0].engine
        registry.keep_alive(grant.lease_id, ENGINE_STATE_DRAINING, None, None, 1.0)
        assert before.state == ENGINE_STATE_SERVING

    def test_unknown_state_is_refused(self) -> None:
        registry = make()
        grant = registry.register(decode(), 0.0, 0.0)
        with pytest.raises(InvalidFieldError, match="state: got 7"):
            registry.keep_alive(grant.lease_id, 7, None, None, 1.0)  # type: ignore[arg-type]  # hostile input

    def test_unknown_lease(self) -> None:
        with pytest.raises(UnknownError, match="register again"):
            make().keep_alive("L9", 0, None, None, 0.0)


class TestExpiry:
    def test_one_event_when_a_lease_runs_out_and_one_when_it_returns(self) -> None:
        registry = make()
        registry.register(decode(), 10.0, 0.0)
        watcher = watch(registry)
        assert registry.expire(9.9) == 0
        assert registry.expire(10.0) == 1
        assert registry.expire(20.0) == 0
        registry.register(decode(), 10.0, 21.0)
        assert story(watcher) == ["REMOVED d0 1 EXPIRED", "ADDED d0 1"]
        assert registry.expired_total == 1

    def test_renewal_moves_the_deadline(self) -> None:
        registry = make()
        grant = registry.register(decode(), 10.0, 0.0)
        registry.keep_alive(grant.lease_id, 0, None, None, 8.0)
        assert registry.expire(17.9) == 0
        assert registry.expire(18.0) == 1

    def test_a_pause_of_the_service_expires_nobody(self) -> None:
        registry = make()
        registry.register(decode(), 10.0, 0.0)
        registry.shift_deadlines(60.0)
        assert registry.expire(69.0) == 0
        assert registry.expire(70.0) == 1

    def test_storm(self) -> None:
        registry = make(RegistryLimits(max_engines=5_000))
        for number in range(5_000):
            registry.register(decode(f"d{number}"), 10.0, 0.0)
        watcher = watch(registry)
        assert registry.expire(10.0) == 5_000
        assert len(watcher) == 5_000
        assert registry.leases(ENGINE_ROLE_UNSPECIFIED) == []

    def test_deregister(self) -> None:
        registry = make()
        grant = registry.register(decode(), 0.0, 0.0)
        watcher = watch(registry)
        registry.deregister(grant.lease_id)
        registry.deregister(grant.lease_id)
        assert story(watcher) == ["REMOVED d0 1 DEREGISTERED"]
        assert registry.expire(1e9) == 0


class TestWatch:
    def test_filters_by_role(self) -> None:
        registry = make()
        watcher = watch(registry, ENGINE_ROLE_PREFILL)
        registry.register(decode(), 0.0, 0.0)
        registry.register(prefill(), 0.0, 0.0)
        assert story(watcher) == ["ADDED p0 1"]
        assert [lease.engine.engine_id for lease in registry.leases(ENGINE_ROLE_PREFILL)] == ["p0"]

    def test_resume_gives_exactly_what_was_missed(self) -> None:
        registry = make()
        for number in range(5):
            registry.register(decode(f"d{number}"), 0.0, 0.0)
        missed = registry.changes_after(3, "run-1", ENGINE_ROLE_UNSPECIFIED)
        assert [event.revision for event in missed] == [4, 5]
        assert registry.changes_after(5, "run-1", ENGINE_ROLE_UNSPECIFIED) == []
        assert registry.changes_after(0, "run-1", ENGINE_ROLE_PREFILL) == []

    def test_resume_too_far_back_or_ahead_or_of_another_run(self) -> None:
        registry = make(RegistryLimits(history_events=2))
        for number in range(5):
            registry.register(decode(f"d{number}"), 0.0, 0.0)
        for revision, service_id in ((2, "run-1"), (6, "run-1"), (5, "run-0")):
            with pytest.raises(RevisionGoneError):
                registry.changes_after(revision, service_id, ENGINE_ROLE_UNSPECIFIED)
        assert len(registry.changes_after(3, "run-1", ENGINE_ROLE_UNSPECIFIED)) == 2

    def test_a_slow_watcher_is_told_and_holds_up_nobody(self) -> None:
        registry = make(RegistryLimits(watcher_queue_events=3))
        slow, quick = watch(registry), watch(registry)
        for number in range(10):
            registry.register(decode(f"d{number}"), 0.0, 0.0)
            assert len(story(quick)) == 1
        assert slow.overflowed
        assert len(slow) == 0
        assert not quick.overflowed

    def test_watchers_are_woken_and_forgotten(self) -> None:
        registry = make(RegistryLimits(max_watchers=1))
        woken: list[int] = []
        watcher = registry.watch(ENGINE_ROLE_UNSPECIFIED, lambda: woken.append(1))
        with pytest.raises(LimitError):
            watch(registry)
        registry.register(decode(), 0.0, 0.0)
        registry.unwatch(watcher)
        registry.register(decode("d1"), 0.0, 0.0)
        assert (len(woken), registry.watcher_count) == (1, 0)

    def test_health_watches_take_no_places_of_registry_watches(self) -> None:
        registry = make(RegistryLimits(max_watchers=1, max_health_watches=2))
        woken: list[int] = []
        observers = [registry.observe(lambda: woken.append(1)) for _ in range(2)]
        with pytest.raises(LimitError):
            registry.observe(lambda: None)
        watch(registry)
        assert registry.watcher_count == 3
        registry.register(decode(), 0.0, 0.0)
        for observer in observers:
            registry.unobserve(observer)
            registry.unobserve(observer)
        registry.register(decode("d1"), 0.0, 0.0)
        assert (len(woken), registry.watcher_count) == (2, 1)

    def test_a_report_that_makes_the_engine_too_large_is_refused_and_renews_nothing(self) -> None:
        registry = make()
        grant = registry.register(decode(), 10.0, 0.0)
        load = Load.FromString(b"\xa2\xfa\x01\x80\x80\x80\x01" + bytes(2 * 1024 * 1024))  # an unknown field
        with pytest.raises(InvalidFieldError, match=r"engine: got .* bytes"):
            registry.keep_alive(grant.lease_id, ENGINE_STATE_SERVING, load, None, 5.0)
        assert registry.expire(11.0) == 1


class TestHealth:
    def test_follows_lease_state_and_data_path(self) -> None:
        registry = make()
        assert registry.health_of("d0") is EngineHealth.UNKNOWN
        grant = registry.register(decode(state=ENGINE_STATE_STARTING), 10.0, 0.0)
        assert registry.health_of("d0") is EngineHealth.NOT_SERVING
        registry.keep_alive(grant.lease_id, ENGINE_STATE_SERVING, None, None, 1.0)
        assert registry.health_of("d0") is EngineHealth.SERVING
        registry.keep_alive(grant.lease_id, 0, None, DataPathHealth(ok=False, reason="reader died"), 1.0)
        assert registry.health_of("d0") is EngineHealth.NOT_SERVING
        registry.keep_alive(grant.lease_id, 0, None, DataPathHealth(ok=True), 1.0)
        assert registry.health_of("d0") is EngineHealth.SERVING
        registry.keep_alive(grant.lease_id, ENGINE_STATE_DRAINING, None, None, 1.0)
        assert registry.health_of("d0") is EngineHealth.NOT_SERVING
        registry.expire(100.0)
        assert registry.health_of("d0") is EngineHealth.NOT_SERVING

    def test_removed_engines_are_remembered_within_bounds(self) -> None:
        registry = make(RegistryLimits(removed_memory=2))
        for number in range(4):
            registry.deregister(registry.register(decode(f"d{number}"), 0.0, 0.0).lease_id)
        assert [registry.health_of(f"d{number}") for number in range(4)] == [
            EngineHealth.UNKNOWN,
            EngineHealth.UNKNOWN,
            EngineHealth.NOT_SERVING,
            EngineHealth.NOT_SERVING,
        ]


class TestCompatibility:
    def check(self, p_changes: dict[str, object], d_changes: dict[str, object]) -> None:
        registry = make()
        registry.register(prefill(**p_changes), 0.0, 0.0)
        registry.register(decode(**d_changes), 0.0, 0.0)
        registry.check_compatibility("p0", "d0", 0.0)

    def test_equal_engines_fit(self) -> None:
        self.check({}, {})

    @pytest.mark.parametrize(
        ("changes", "field", "values"),
        [
            ({"wire_version": 2}, "layout.wire_version", ("1", "2")),
            ({"transfer_backend": "memfabric"}, "layout.transfer_backend", ("host", "memfabric")),
            ({"transfer_protocol": "sdma"}, "layout.transfer_protocol", ("", "sdma")),
            ({"model": "big"}, "layout.model", ("tiny", "big")),
            ({"kv_dtype": "int8"}, "layout.kv_dtype", ("bfloat16", "int8")),
            ({"block_size_tokens": 64}, "layout.block_size_tokens", ("128", "64")),
            ({"layers": layout().layers[:2]}, "layout.layers (number)", ("3", "2")),
        ],
    )
    def test_a_difference_names_field_and_both_values(
        self, changes: dict[str, object], field: str, values: tuple[str, str]
    ) -> None:
        with pytest.raises(IncompatibleError) as refused:
            self.check({}, {"layout": layout(fingerprint=b"g" * 32, **changes)})
        assert refused.value.field == field
        assert f"prefill has {values[0]}, decode has {values[1]}" in refused.value.message

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda layer: setattr(layer, "name", "other"), "name"),
            (lambda layer: layer.main_block_bytes.append(1), "main_block_bytes"),
            (lambda layer: layer.main_block_bytes.__setitem__(0, 1), "main_block_bytes"),
            (lambda layer: setattr(layer, "indexer_block_bytes", 0), "indexer_block_bytes"),
            (lambda layer: setattr(layer, "scale_block_bytes", 8), "scale_block_bytes"),
        ],
    )
    def test_a_different_layer_names_it(self, change: Callable[[object], None], field: str) -> None:
        other = layout(fingerprint=b"g" * 32)
        change(other.layers[1])
        with pytest.raises(IncompatibleError) as refused:
            self.check({}, {"layout": other})
        assert refused.value.field == f"layout.layers[1].{field}"

    def test_equal_fields_but_other_fingerprints(self) -> None:
        with pytest.raises(IncompatibleError, match="fingerprint"):
            self.check({}, {"layout": layout(fingerprint=b"g" * 32)})

    def test_a_missing_fingerprint_leaves_it_to_the_fields(self) -> None:
        self.check({}, {"layout": layout(fingerprint=b"")})

    @pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 4), (3, 2)])
    def test_topology_rule_names_both_sizes(self, p_tp: int, d_tp: int) -> None:
        with pytest.raises(IncompatibleError, match=f"tp_size: prefill has {p_tp}, decode has {d_tp}"):
            self.check({"tp_size": p_tp}, {"tp_size": d_tp})

    def test_a_multiple_of_decode_fits(self) -> None:
        self.check({"tp_size": 8}, {"tp_size": 2})

    def test_unknown_engine_role_and_layout(self) -> None:
        registry = make()
        registry.register(prefill(), 0.0, 0.0)
        registry.register(decode(layout=None), 0.0, 0.0)
        with pytest.raises(UnknownError, match="'p9'"):
            registry.check_compatibility("p9", "d0", 0.0)
        with pytest.raises(InvalidFieldError, match="prefill_engine_id"):
            registry.check_compatibility("d0", "d0", 0.0)
        with pytest.raises(NotYetError, match="layout"):
            registry.check_compatibility("p0", "d0", 0.0)

    def test_in_the_grace_period_absent_means_not_yet(self) -> None:
        registry = make(RegistryLimits(grace_s=5.0), now_s=100.0)
        with pytest.raises(NotYetError, match="just started"):
            registry.check_compatibility("p0", "d0", 104.9)
        with pytest.raises(UnknownError):
            registry.check_compatibility("p0", "d0", 105.0)
