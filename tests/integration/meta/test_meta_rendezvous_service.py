"""Rendezvous over a socket: order, ends, late joiners, limits. Cases R3, R4, R5."""

import asyncio
import secrets
from collections.abc import Callable

import grpc
import pytest
from meta_harness import MetaProcess, child, engine, in_background, take, take_all, until, words
from rd2h_client import (
    ClientOptions,
    MetaClient,
    MetaExhaustedError,
    MetaRefusedError,
    RendezvousEndedError,
    SyncMetaClient,
)
from rd2h_client.v1 import rendezvous_pb2 as rv
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousStub


@pytest.fixture
def rid() -> str:
    return secrets.token_hex(16)


async def test_children_stream_to_the_waiter_as_they_advertise(client: MetaClient, rid: str) -> None:
    events = client.await_children(rid, 2, ttl_s=60.0)
    await client.advertise(rid, child("a"))
    assert await take(events, 1) == ["advertised a"]
    await client.advertise(rid, child("b"))
    assert await take(events, 2) == ["advertised b", "complete 2"]
    await client.withdraw(rid, "a", rv.OUTCOME_DONE)
    await client.withdraw(rid, "b", rv.OUTCOME_DONE)
    assert await take_all(events) == ["ended a DONE", "ended b DONE", "closed DONE"]


async def test_a_late_waiter_learns_everything(client: MetaClient, rid: str) -> None:
    await client.advertise(rid, child("a"))
    await client.withdraw(rid, "b", rv.OUTCOME_ABORTED, "client left", prompt_index=1)
    assert await take(client.await_children(rid, 2, ttl_s=60.0), 3) == ["ended b ABORTED", "advertised a", "complete 1"]
    await client.cancel(rid, "over")
    async with MetaClient(client.target.url) as other:
        story = await take_all(other.await_children(rid, 2, ttl_s=60.0))
    assert story == ["ended b ABORTED", "ended a ABORTED", "complete 0", "closed ABORTED"]


async def test_failure_before_and_after_the_advert_reaches_decode_at_once(client: MetaClient, rid: str) -> None:
    async with in_background(client.target.url, engine(f"d-{rid}")) as decode:
        decode.advertise(rid, child("a"))
        assert await take(client.await_children(rid, 2, ttl_s=60.0), 1) == ["advertised a"]
        await client.report_failure(rid, "prefill answered 500")
        notices = []

        def collected(count: int) -> bool:
            notices.extend(decode.drain_events())
            return len(notices) >= count

        await until(lambda: collected(1))
        decode.advertise(rid, child("b"))  # too late: refused with the reason, not after a time-out
        await until(lambda: collected(2))
    assert [(notice.rendezvous_id, notice.request_id, notice.outcome) for notice in notices] == [
        (rid, "a", rv.OUTCOME_FAILED),
        (rid, "b", rv.OUTCOME_FAILED),
    ]
    assert all("prefill answered 500" in notice.reason for notice in notices)


async def test_an_advert_after_the_end_says_outcome_and_reason(client: MetaClient, rid: str) -> None:
    await client.cancel(rid, "the client went away")
    with pytest.raises(RendezvousEndedError, match="the client went away") as refused:
        await client.advertise(rid, child("a"))
    assert refused.value.outcome == rv.OUTCOME_ABORTED
    with SyncMetaClient(client.target.url) as simple, pytest.raises(RendezvousEndedError) as unary:
        await asyncio.to_thread(simple.advertise, rid, child("a"))
    assert unary.value.outcome == rv.OUTCOME_ABORTED


async def test_refusals_name_the_field(client: MetaClient, rid: str) -> None:
    with pytest.raises(MetaRefusedError, match=r"child\.host: got '0\.0\.0\.0', allowed: .*not a wildcard") as refused:
        await client.advertise(rid, child("a", host="0.0.0.0"))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    await client.advertise(rid, child("a"))
    with pytest.raises(MetaRefusedError, match="another token") as conflict:
        await client.advertise(rid, child("a"))
    assert conflict.value.code is grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(MetaRefusedError, match="expected_children"):
        await take(client.await_children(rid, 0, ttl_s=1.0), 1)


async def test_an_operation_of_no_kind_is_refused_and_the_stream_goes_on(client: MetaClient, rid: str) -> None:
    async with grpc.aio.insecure_channel(client.target.authority) as channel:
        call = RendezvousStub(channel).Exchange()
        assert (await call.read()).service_id == client.service_id
        cancel = rv.CancelRequest(rendezvous_id=rid)
        operations = [rv.Operation(op_id=1), rv.Operation(op_id=2, cancel=cancel)]
        await call.write(rv.ExchangeRequest(operations=operations))
        response = await call.read()
        assert [(result.op_id, result.code) for result in response.results] == [(1, 3)]
        assert response.operations_done == 2
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_garbage_on_the_wire_hurts_nobody_else(client: MetaClient, rid: str) -> None:
    async with grpc.aio.insecure_channel(client.target.authority) as channel:
        raw = channel.stream_stream("/rd2h.meta.v1.Rendezvous/Exchange")
        call = raw()
        await call.read()
        await call.write(b"\xff\xff\xff\xff garbage")
        assert await call.code() is not grpc.StatusCode.OK
        reader, writer = await asyncio.open_connection(client.target.host, client.target.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
        await writer.drain()
        await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
    await client.advertise(rid, child("a"))


async def test_the_unary_await_ends_with_the_rendezvous_or_its_deadline(client: MetaClient, rid: str) -> None:
    async with grpc.aio.insecure_channel(client.target.authority) as channel:
        stub = RendezvousStub(channel)
        call = stub.Await(rv.AwaitRequest(rendezvous_id=rid, expected_children=1), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call.read()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await client.advertise(rid, child("a"))
        await client.withdraw(rid, "a", rv.OUTCOME_DONE)
        call = stub.Await(rv.AwaitRequest(rendezvous_id=rid, expected_children=1), timeout=10.0)
        story = [words(event) async for response in call for event in response.events]
        assert story == ["ended a DONE", "complete 0", "closed DONE"] or story == ["ended a DONE", "closed DONE"]


async def test_a_thousand_children_complete(client: MetaClient, rid: str) -> None:
    events = client.await_children(rid, 1_000, ttl_s=60.0)
    async with MetaClient(client.target.url) as decode:
        await asyncio.gather(*(decode.advertise(rid, child(f"c{number}")) for number in range(1_000)))
        story = await take(events, 1_001, timeout_s=30.0)
        assert story[-1] == "complete 1000"
        assert len(set(story)) == 1_001
        await client.cancel(rid, "done", rv.OUTCOME_DONE)
        assert await take_all(events) == ["closed DONE"]


async def test_two_streams_of_awaits_do_not_mix(client: MetaClient) -> None:
    names = [secrets.token_hex(8) for _ in range(200)]
    iterators = [client.await_children(name, 1, ttl_s=60.0) for name in names]
    async with MetaClient(client.target.url) as decode:
        await asyncio.gather(*(decode.advertise(name, child(f"c-{name}")) for name in reversed(names)))
    for name, events in zip(names, iterators, strict=True):
        assert await take(events, 2) == [f"advertised c-{name}", "complete 1"]
        await events.aclose()
    assert client.exchange.open_awaits == 0


async def test_awaiting_twice_in_one_client_is_an_error(client: MetaClient, rid: str) -> None:
    events = client.await_children(rid, 1, ttl_s=60.0)
    with pytest.raises(ValueError, match="awaited already"):
        client.await_children(rid, 1, ttl_s=60.0)
    await events.aclose()
    again = client.await_children(rid, 1, ttl_s=60.0)
    await client.advertise(rid, child("a"))
    assert await take(again, 1) == ["advertised a"]


async def test_limits_are_told_with_a_delay_and_lifted(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--max-open", "2", "--max-children", "3")
    options = ClientOptions(deadline_s=1.0)
    async with MetaClient(service.target, options) as client:
        await client.advertise("r1", child("a"))
        await client.advertise("r2", child("a"))
        with pytest.raises(MetaExhaustedError, match="2 rendezvous are open") as refused:
            await client.advertise("r3", child("a"))
        assert refused.value.retry_after_s == 0.5
        waiting = asyncio.create_task(client.advertise("r3", child("a")))
        await client.cancel("r1", "make room")
        await waiting  # retried after the delay that the service named
        await client.advertise("r3", child("b"))
        await client.advertise("r3", child("c"))
        with pytest.raises(MetaExhaustedError, match="3 children"):
            await client.advertise("r3", child("d"))
    with SyncMetaClient(service.target, ClientOptions(deadline_s=1.0)) as simple:
        with pytest.raises(MetaExhaustedError) as unary:
            await asyncio.to_thread(simple.advertise, "r4", child("a"))
        assert unary.value.retry_after_s == 0.5


async def test_a_message_that_is_too_large_is_refused(client: MetaClient) -> None:
    async with grpc.aio.insecure_channel(
        client.target.authority, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        request = rv.ReportFailureRequest(rendezvous_id="r", reason="x" * 5_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RendezvousStub(channel).ReportFailure(request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_stats(client: MetaClient, rid: str) -> None:
    before = await client.stats()
    await client.report_failure(rid, "broken\nwire", ["a"])
    after = await client.stats()
    assert after.open == before.open + 1
    assert after.totals["children_failed"] == before.totals["children_failed"] + 1
    assert (after.recent_failures[0].rendezvous_id, after.recent_failures[0].reason) == (rid, "broken wire")
