"""The service dies, stalls and comes back. Cases R1, R6."""

import asyncio
import signal
import time
from collections.abc import Callable

import pytest
from meta_harness import MetaProcess, child, engine, engine_ids, in_background, take, take_all, until
from rd2h_client import ClientOptions, EngineBatch, EngineStatus, MetaClient, MetaUnavailableError
from rd2h_client.v1 import engine_registry_pb2 as er
from rd2h_client.v1 import rendezvous_pb2 as rv

RENDEZVOUS = 5_000
CONCURRENCY = 250
PATIENT = ClientOptions(deadline_s=60.0, connect_deadline_s=30.0)


async def test_killed_and_restarted_under_load_loses_nothing(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    stories: dict[str, list[str]] = {}
    numbers = iter(range(RENDEZVOUS))
    async with MetaClient(service.target, PATIENT) as proxy, in_background(service.target, engine("d0")) as decode:

        async def one(number: int) -> None:
            """One request, as the proxy and Decode live it."""
            rid = f"r{number}"
            events = proxy.await_children(rid, 2, ttl_s=120.0)
            decode.advertise(rid, child(f"{rid}-a"))
            decode.advertise(rid, child(f"{rid}-b"))
            story = await take(events, 3, timeout_s=60.0)
            decode.withdraw(rid, f"{rid}-a", rv.OUTCOME_DONE)
            decode.withdraw(rid, f"{rid}-b", rv.OUTCOME_DONE)
            stories[rid] = story + await take_all(events, timeout_s=60.0)

        async def worker() -> None:
            for number in numbers:
                await one(number)

        async def killer() -> None:
            for share in (0.2, 0.5, 0.8):
                await until(lambda share=share: len(stories) >= share * RENDEZVOUS, timeout_s=60.0)  # type: ignore[misc]
                await asyncio.to_thread(service.kill)
                await asyncio.to_thread(service.start)

        await asyncio.gather(killer(), *(worker() for _ in range(CONCURRENCY)))
        assert len(stories) == RENDEZVOUS
        for rid, story in stories.items():
            assert sorted(story[:2]) == [f"advertised {rid}-a", f"advertised {rid}-b"]
            assert story[2] == "complete 2"
            assert sorted(story[3:5]) == [f"ended {rid}-a DONE", f"ended {rid}-b DONE"]
            assert story[5:] == ["closed DONE"]
        await until(lambda: engine_ids(proxy), what="the engine is registered again")
        assert decode.drain_events() == []
        assert decode.refused_total == 0


async def test_open_adverts_awaits_and_ends_survive_a_restart(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    async with MetaClient(service.target, PATIENT) as proxy, in_background(service.target, engine("d0")) as decode:
        events = proxy.await_children("r", 2, ttl_s=60.0)
        decode.advertise("r", child("a"))
        decode.advertise("early", child("x"))
        assert await take(events, 1) == ["advertised a"]
        await proxy.cancel("gone", "the client went away")
        first_run = proxy.service_id
        service.kill()
        await until(lambda: not proxy.connected)
        decode.advertise("r", child("b"))  # while nobody is there
        late = proxy.await_children("early", 1, ttl_s=60.0)
        await asyncio.to_thread(service.start)
        assert await take(events, 2) == ["advertised b", "complete 2"]
        assert await take(late, 2) == ["advertised x", "complete 1"]
        assert proxy.service_id != first_run
        decode.advertise("gone", child("y"))  # the restarted service was told again that this one has ended
        notices = []
        await until(lambda: notices.extend(decode.drain_events()) or notices)
        assert (notices[0].request_id, notices[0].outcome) == ("y", rv.OUTCOME_ABORTED)
        assert "the client went away" in notices[0].reason


async def test_watchers_keep_engines_through_a_restart_and_drop_those_that_stay_away(
    make_service: Callable[..., MetaProcess],
) -> None:
    service = make_service("--restart-grace-s", "2")
    async with MetaClient(service.target, PATIENT) as watcher, MetaClient(service.target, PATIENT) as leaver:
        stays = await watcher.register(engine("stays"), ttl_s=30.0)
        leaves = await leaver.register(engine("leaves"), ttl_s=30.0)
        known: dict[str, int] = {}
        removed: list[tuple[str, er.EngineEvent.Reason, float]] = []
        lowest = [2]

        async def follow() -> None:
            async for batch in watcher.watch_engines():
                if batch.snapshot:
                    known.clear()
                for event in batch.events:
                    if event.kind == er.EngineEvent.KIND_REMOVED:
                        known.pop(event.engine.engine_id)
                        removed.append((event.engine.engine_id, event.reason, time.monotonic()))
                    else:
                        known[event.engine.engine_id] = event.engine.generation
                if not removed:
                    lowest[0] = min(lowest[0], len(known))

        task = asyncio.create_task(follow())
        await until(lambda: len(known) == 2)
        lowest[0] = 2
        service.kill()
        leaves._task.cancel()  # type: ignore[union-attr]  # this engine dies with the service
        await leaver.close()
        await asyncio.to_thread(service.start)
        restarted_s = time.monotonic()
        await until(lambda: removed, timeout_s=20.0)
        assert lowest[0] == 2, "an engine was dropped although it might have come back"
        assert removed[0][:2] == ("leaves", er.EngineEvent.REASON_EXPIRED)
        assert removed[0][2] - restarted_s > 1.0
        assert known == {"stays": 1}
        task.cancel()
        await stays.close()


async def test_a_stalled_service_expires_nobody_and_answers_afterwards(
    make_service: Callable[..., MetaProcess],
) -> None:
    service = make_service()
    async with MetaClient(service.target, PATIENT) as client, in_background(service.target, engine("d0")) as decode:
        await until(lambda: engine_ids(client))
        batches: list[EngineBatch] = []

        async def follow() -> None:
            async for batch in client.watch_engines():
                batches.append(batch)

        task = asyncio.create_task(follow())
        await until(lambda: batches)
        renewals: list[float] = []

        def status() -> EngineStatus:
            renewals.append(time.monotonic())
            return EngineStatus()

        registration = await client.register(engine("short"), status, ttl_s=1.0)
        lease_id = registration.lease_id
        events = client.await_children("r", 1, ttl_s=2.5)
        await until(lambda: client.exchange.pending.nothing_to_send and not len(client.exchange.pending))
        service.signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)  # longer than lease and rendezvous: the pause itself is what is tested
        decode.advertise("r", child("a"))
        service.signal(signal.SIGCONT)
        assert await take(events, 2) == ["advertised a", "complete 1"]
        resumed_s = time.monotonic()
        await until(lambda: sum(at_s > resumed_s for at_s in renewals) >= 3)
        assert registration.lease_id == lease_id
        changes = [event.kind for batch in batches for event in batch.events if event.engine.engine_id == "short"]
        assert changes == [er.EngineEvent.KIND_ADDED]
        await registration.close()
        task.cancel()


async def test_without_a_service_operations_end_at_their_deadline_and_start_says_why(
    make_service: Callable[..., MetaProcess],
) -> None:
    service = make_service()
    options = ClientOptions(deadline_s=0.5, connect_deadline_s=0.5)
    async with MetaClient(service.target, options) as client:
        service.kill()
        await until(lambda: not client.connected)
        started_s = time.monotonic()
        with pytest.raises(MetaUnavailableError, match="before the deadline"):
            await client.advertise("r", child("a"))
        with pytest.raises(MetaUnavailableError):
            await client.list_engines()
        assert time.monotonic() - started_s < 3.0
        with pytest.raises(MetaUnavailableError, match=r"(?i)no answer within 0.5 s: .*connect"):
            await MetaClient(service.target, options).start()
        events = client.await_children("r2", 1, ttl_s=-4.8)  # the client adds five seconds for the service to speak
        with pytest.raises(MetaUnavailableError, match="out of reach"):
            await take(events, 1)


async def test_a_client_may_start_before_the_service(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    service.kill()
    async with in_background(service.target, engine("d0")) as decode:
        decode.advertise("r", child("a"))
        assert not decode.connected
        await asyncio.to_thread(service.start)
        async with MetaClient(service.target, PATIENT) as proxy:
            assert await take(proxy.await_children("r", 1, ttl_s=30.0), 2) == ["advertised a", "complete 1"]
            await until(lambda: engine_ids(proxy))


async def test_ten_thousand_open_rendezvous_stay_small_and_expire_on_time(
    make_service: Callable[..., MetaProcess],
) -> None:
    service = make_service()
    async with MetaClient(service.target, PATIENT) as client:
        await client.advertise("warm", child("w"))
        before_bytes = service.resident_bytes()
        for start in range(0, 10_000, 500):
            await asyncio.gather(
                *(
                    client.advertise(f"r{number}", child(f"c{number}"), ttl_s=6.0)
                    for number in range(start, start + 500)
                )
            )
        sent_s = time.monotonic()
        stats = await client.stats()
        assert stats.open == 10_001, "the machine is too slow for this test's time limit"
        assert service.resident_bytes() - before_bytes < 100 * 1024 * 1024

        async def expired() -> bool:
            return (await client.stats()).open == 1

        await until(expired, timeout_s=20.0)
        assert time.monotonic() - sent_s < 7.5
        assert (await client.stats()).totals["rendezvous_expired"] == 10_000
