"""The background client of an engine's scheduler: never blocks, loses nothing, idles when nothing happens."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from meta_harness import MetaProcess, background, child, engine, engine_ids, in_background, take_all, until
from rd2h_client import ClientOptions, EngineStatus, MetaClient, QueueFullError
from rd2h_client.v1 import engine_registry_pb2 as er
from rd2h_client.v1 import rendezvous_pb2 as rv


async def test_methods_return_at_once_without_a_service_and_the_queue_is_bounded() -> None:
    client = background("127.0.0.1:1", engine(), max_open=100)
    try:
        started_s = time.monotonic()
        for number in range(1_000):
            try:
                client.advertise("r", child(f"c{number}"))
            except QueueFullError:
                break
        # What does not fit is refused or told as a notice; nothing is silently dropped.
        await until(lambda: not client._commands)
        notices = client.drain_events()
        assert number + 1 >= 100
        assert len(notices) >= number - 100
        assert all("adverts are open" in notice.reason for notice in notices)
        assert time.monotonic() - started_s < 5.0
        assert not client.connected
        assert client.generation_of("d0") is None
    finally:
        assert await asyncio.to_thread(client.stop, 5.0)


async def test_many_threads_use_one_client(shared_service: MetaProcess) -> None:
    async with (
        MetaClient(shared_service.target) as proxy,
        in_background(shared_service.target, engine("d-threads")) as decode,
    ):
        count, threads = 200, 8
        iterators = [proxy.await_children(f"t{k}-{n}", 1, ttl_s=60.0) for k in range(threads) for n in range(count)]

        def work(k: int) -> None:
            for n in range(count):
                decode.advertise(f"t{k}-{n}", child(f"c{k}-{n}"))
                decode.withdraw(f"t{k}-{n}", f"c{k}-{n}", rv.OUTCOME_DONE)

        workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
        for worker in workers:
            worker.start()
        for events in iterators:
            story = await take_all(events, timeout_s=30.0)
            # The child may have come and gone before the await reached the service.
            kinds = [line.split()[0] for line in story if not line.startswith(("advertised", "complete"))]
            assert kinds == ["ended", "closed"]
            assert story[-1] == "closed DONE"
        for worker in workers:
            await asyncio.to_thread(worker.join)
        assert decode.drain_events() == []


async def test_status_is_polled_and_flows_into_the_lease(shared_service: MetaProcess) -> None:
    alive = True

    def status() -> EngineStatus:
        health = er.DataPathHealth(ok=alive, reason="" if alive else "reader died")
        return EngineStatus(er.ENGINE_STATE_SERVING, er.Load(pulling_requests=4), health)

    async with MetaClient(shared_service.target) as client:

        async def listed() -> er.Engine | None:
            found = [entry for entry in await client.list_engines() if entry.engine_id == "d-status"]
            return found[0] if found else None

        async with in_background(shared_service.target, engine("d-status"), status) as decode:
            async with asyncio.timeout(10.0):
                while (entry := await listed()) is None:
                    await asyncio.sleep(0.02)
            assert entry.load.pulling_requests == 4
            assert entry.health.ok
            alive = False
            decode.renew()
            async with asyncio.timeout(2.0):
                while (entry := await listed()) is None or entry.health.ok:
                    await asyncio.sleep(0.02)
            assert entry.health.reason == "reader died"
            changed = engine("d-status", layout=er.Layout(model="tiny"))
            decode.update_engine(changed)
            async with asyncio.timeout(2.0):
                while (entry := await listed()) is None or entry.layout.model != "tiny":
                    await asyncio.sleep(0.02)
        assert await listed() is None, "stop() ends the lease"


async def test_generations_follow_the_registry(shared_service: MetaProcess) -> None:
    async with in_background(shared_service.target, engine("d-gen", 41)) as decode:
        await until(lambda: decode.generation_of("d-gen") == 41)
        async with in_background(shared_service.target, engine("p-gen", 7)):
            await until(lambda: decode.generation_of("p-gen") == 7)
        await until(lambda: decode.generation_of("p-gen") is None)
        async with in_background(shared_service.target, engine("p-gen", 8)):
            await until(lambda: decode.generation_of("p-gen") == 8)


async def test_notices_tell_how_adverts_ended(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    async with (
        MetaClient(service.target) as proxy,
        in_background(service.target, engine("d0"), advert_ttl_s=1.0) as decode,
    ):
        decode.advertise("cancelled", child("a"))
        decode.advertise("failed", child("b"))
        decode.advertise("expires", child("c"))
        decode.advertise("refused", child("d", host="0.0.0.0"))
        decode.advertise("withdrawn", child("e"))
        decode.withdraw("withdrawn", "e", rv.OUTCOME_DONE)

        async def arrived() -> bool:
            return (await proxy.stats()).totals["advertised"] == 4

        await until(arrived)
        await proxy.cancel("cancelled", "client left")
        await proxy.report_failure("failed", "prefill died", ["b"])
        notices = {}

        def collect() -> bool:
            notices.update({notice.rendezvous_id: notice for notice in decode.drain_events()})
            return len(notices) == 4

        await until(collect)
        outcomes = {rid: rv.Outcome.Name(notice.outcome) for rid, notice in notices.items()}
        assert outcomes == {
            "cancelled": "OUTCOME_ABORTED",
            "failed": "OUTCOME_FAILED",
            "expires": "OUTCOME_EXPIRED",
            "refused": "OUTCOME_FAILED",
        }
        assert notices["cancelled"].reason == "client left"
        assert "child.host" in notices["refused"].reason
        assert notices["failed"].request_id == "b"


async def test_an_engine_that_was_replaced_says_so(shared_service: MetaProcess) -> None:
    async with (
        MetaClient(shared_service.target) as client,
        in_background(shared_service.target, engine("d-twice", 1)) as first,
    ):
        await until(lambda: first.generation_of("d-twice") == 1)
        async with in_background(shared_service.target, engine("d-twice", 2)):
            await until(lambda: first.generation_of("d-twice") == 2)
            first.renew()
            await until(lambda: first.registration_lost is not None)
            assert "replaced by generation 2" in str(first.registration_lost)
            assert "d-twice" in await engine_ids(client)


async def test_the_client_sleeps_when_nothing_happens(shared_service: MetaProcess) -> None:
    async with in_background(shared_service.target, engine("d-idle")) as decode:
        decode.advertise("idle", child("a"))
        await until(lambda: decode.generation_of("d-idle"))
        before = own_switches()
        window_s = 2.0
        await asyncio.to_thread(time.sleep, window_s)
        wakeups = {name: count - before.get(name, 0) for name, count in own_switches().items()}
        assert sum(wakeups.values()) < 20 * window_s, wakeups
        decode.withdraw("idle", "a", rv.OUTCOME_DONE)


def own_switches() -> dict[str, int]:
    """Voluntary context switches of the background client's loop thread: how often it woke up."""
    switches = {}
    for task in Path("/proc/self/task").iterdir():
        text = (task / "status").read_text()
        lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        ident = [thread for thread in threading.enumerate() if thread.native_id == int(task.name)]
        if ident and ident[0].name == "rd2h-meta-client":
            switches[task.name] = int(lines["voluntary_ctxt_switches"])
    assert switches, "the background client's thread was not found"
    return switches


def test_it_is_started_once_and_stopping_twice_is_fine(shared_service: MetaProcess) -> None:
    client = background(shared_service.target, engine("d-once"))
    with pytest.raises(RuntimeError, match="started already"):
        client.start()
    assert client.stop(5.0)
    assert client.stop(5.0)


def test_options_are_checked_before_anything_starts() -> None:
    assert ClientOptions().deadline_s > 0
    with pytest.raises(ValueError, match="meta service address"):
        background("nonsense", engine())
