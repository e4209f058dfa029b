"""Membership without a network."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from rd2h_client.engine_watch import EngineBatch
from rd2h_client.errors import MetaRefusedError
from rd2h_client.v1.engine_registry_pb2 import Engine, EngineEvent, EngineRole, EngineState
from rd2h_proxy.membership import Membership
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.target import Role, Target, pair_conflict

LIMITS = {Role.PREFILL: 5, Role.DECODE: 5}


def engine(name: str, address: str = "", generation: int = 1, role: int = EngineRole.ENGINE_ROLE_DECODE) -> Engine:
    state = EngineState.ENGINE_STATE_SERVING
    return Engine(engine_id=name, generation=generation, role=role, http_address=address, state=state, tp_size=1)


def added(*engines: Engine, snapshot: bool = False) -> EngineBatch:
    return EngineBatch(snapshot, [EngineEvent(kind=EngineEvent.KIND_ADDED, engine=entry) for entry in engines])


def removed(entry: Engine, reason: EngineEvent.Reason = EngineEvent.REASON_EXPIRED) -> EngineBatch:
    return EngineBatch(False, [EngineEvent(kind=EngineEvent.KIND_REMOVED, engine=entry, reason=reason)])


def make(discover: bool, *static: str) -> tuple[Membership, EnginePool]:
    pools = {role: EnginePool(role, 10, lambda: 0.0) for role in Role}
    for address in static:
        pools[Role.DECODE].add(Target(Role.DECODE, address, 5, static=True))
    return Membership(pools, LIMITS, discover), pools[Role.DECODE]


def addresses(pool: EnginePool) -> list[str]:
    return sorted(target.address for target in pool.usable())


async def test_discovery_adds_and_removes_targets() -> None:
    membership, pool = make(True)
    membership.apply(added(engine("a", "h:1"), engine("b", "h:2"), snapshot=True))
    assert addresses(pool) == ["h:1", "h:2"]
    membership.apply(removed(engine("a", "h:1")))
    assert addresses(pool) == ["h:2"]
    membership.apply(added(engine("c", "h:3"), snapshot=True))
    assert addresses(pool) == ["h:3"]


async def test_static_targets_stay_but_heed_the_registry() -> None:
    membership, pool = make(False, "h:1", "h:2")
    membership.apply(added(engine("a", "h:1"), engine("x", "h:9"), snapshot=True))
    assert addresses(pool) == ["h:1", "h:2"]
    membership.apply(removed(engine("a", "h:1")))
    assert addresses(pool) == ["h:2"]
    assert pool.describe_unusable().startswith("h:1: its lease has ended")
    membership.apply(added(engine("a", "h:1", generation=2)))
    assert addresses(pool) == ["h:1", "h:2"]


async def test_a_late_removal_of_an_old_generation_changes_nothing() -> None:
    membership, pool = make(True)
    membership.apply(added(engine("a", "h:1", generation=2), snapshot=True))
    membership.apply(removed(engine("a", "h:1", generation=1), EngineEvent.REASON_REPLACED))
    assert addresses(pool) == ["h:1"]


async def test_replacement_gives_up_what_the_old_process_had() -> None:
    membership, pool = make(True)
    membership.apply(added(engine("a", "h:1"), snapshot=True))
    target = pool.get("h:1")
    assert target is not None
    reasons: list[str] = []
    target.watch_loss(reasons.append)
    membership.apply(removed(engine("a", "h:1"), EngineEvent.REASON_REPLACED))
    assert reasons == ["engine a was restarted"]


async def test_an_engine_that_moves_leaves_its_old_target() -> None:
    membership, pool = make(True)
    membership.apply(added(engine("a", "h:1"), snapshot=True))
    membership.apply(added(engine("a", "h:2")))
    assert addresses(pool) == ["h:2"]


async def test_an_engine_without_address_is_learned_from_its_adverts() -> None:
    membership, pool = make(False, "h:1")
    membership.apply(added(engine("a"), snapshot=True))
    membership.learn("a", "h:1")
    membership.learn("unknown", "h:1")
    membership.apply(removed(engine("a")))
    assert addresses(pool) == []


async def test_a_target_with_requests_stays_known_until_they_end() -> None:
    membership, pool = make(True)
    membership.apply(added(engine("a", "h:1"), snapshot=True))
    lease = await pool.acquire(1, 1)
    membership.apply(removed(engine("a", "h:1")))
    assert pool.get("h:1") is not None
    assert addresses(pool) == []
    lease.release()
    assert pool.get("h:1") is None


async def test_a_target_that_came_back_while_it_had_requests_stays() -> None:
    membership, pool = make(True, "h:9")
    membership.apply(added(engine("a", "h:1"), snapshot=True))
    first, second = await pool.acquire(1, 1), await pool.acquire(1, 1)
    membership.apply(removed(engine("a", "h:1")))
    membership.apply(added(engine("a", "h:1", generation=2)))
    first.release()
    second.release()
    assert addresses(pool) == ["h:1", "h:9"]


def test_pairs_need_equal_layouts_and_divisible_tensor_parallelism() -> None:
    def target(role: Role, tp_size: int, fingerprint: bytes) -> Target:
        made = Target(role, "h:1", 5)
        entry = engine("e", "h:1")
        entry.tp_size = tp_size
        entry.layout.fingerprint = fingerprint
        made.engines["e"] = entry
        return made

    def fits(p_tp: int, d_tp: int, p_print: bytes = b"1", d_print: bytes = b"1") -> bool:
        return pair_conflict(target(Role.PREFILL, p_tp, p_print), target(Role.DECODE, d_tp, d_print)) is None

    assert fits(4, 2)
    assert fits(1, 1, b"", b"1")
    assert not fits(2, 4)
    assert not fits(3, 2)
    assert not fits(1, 1, b"1", b"2")


async def test_a_restart_that_only_a_new_snapshot_tells_gives_up_what_the_old_process_had() -> None:
    membership, pool = make(True)
    membership.apply(added(engine("a", "h:1"), engine("b", "h:2"), snapshot=True))
    lost: list[str] = []
    for address in ("h:1", "h:2"):
        target = pool.get(address)
        assert target is not None
        target.watch_loss(lost.append)
    membership.apply(added(engine("a", "h:1", generation=2), engine("b", "h:2"), snapshot=True))
    assert lost == ["engine a was restarted"]
    assert addresses(pool) == ["h:1", "h:2"]


async def test_an_address_that_was_learned_is_forgotten_with_the_process_that_had_it() -> None:
    membership, pool = make(False, "h:1", "h:2")
    membership.apply(added(engine("a"), snapshot=True))
    membership.learn("a", "h:1")
    membership.apply(added(engine("a", generation=2), snapshot=True))
    membership.learn("a", "h:2")
    assert [target.address for target in pool.targets if "a" in target.engines] == ["h:2"]


class RefusingWatcher:
    """A registry whose watches are refused, and given once in between."""

    def __init__(self) -> None:
        self.watches = 0
        self.tried_enough = asyncio.Event()

    async def watch_engines(self, role: EngineRole = EngineRole.ENGINE_ROLE_UNSPECIFIED) -> AsyncIterator[EngineBatch]:
        self.watches += 1
        if self.watches == 5:
            yield added(engine("d0"), snapshot=True)
        if self.watches == 10:
            self.tried_enough.set()
            await asyncio.Event().wait()
        raise MetaRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


async def test_a_refusal_of_the_registry_is_an_error_once_and_again_after_it_was_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rd2h_proxy.membership._WATCH_AGAIN_S", 0.0)
    membership, _ = make(True)
    watcher = RefusingWatcher()
    running = asyncio.create_task(membership.run(watcher))
    async with asyncio.timeout(10.0):
        await watcher.tried_enough.wait()
    running.cancel()
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2
