"""What waits to be written to a stream: batches, bounds, and news that waits for other news."""

import asyncio
import time

from rd2h_client.v1.rendezvous_pb2 import OperationResult, RendezvousEvent
from rd2h_meta.outbox import MAX_ENTRIES_PER_MESSAGE, RELAXED_DELAY_S, Outbox


def event(number: int = 0) -> RendezvousEvent:
    return RendezvousEvent(rendezvous_id=f"r{number}")


async def test_everything_pending_goes_into_one_message() -> None:
    outbox = Outbox(100)
    outbox.put_event(event(1))
    outbox.put_success(7, relaxed=False)
    outbox.put_result(OperationResult(op_id=8, code=3))
    outbox.put_event(event(2))
    response = await outbox.take()
    assert response is not None
    assert [entry.rendezvous_id for entry in response.events] == ["r1", "r2"]
    assert list(response.succeeded) == [7]
    assert [result.op_id for result in response.results] == [8]


async def test_a_taker_is_woken() -> None:
    outbox = Outbox(100)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put_event(event())
    response = await asyncio.wait_for(taking, 5.0)
    assert response is not None
    assert len(response.events) == 1


async def test_messages_are_bounded_in_size() -> None:
    outbox = Outbox(10_000)
    for number in range(MAX_ENTRIES_PER_MESSAGE + 5):
        outbox.put_event(event(number))
    sizes = []
    for _ in range(2):
        response = await outbox.take()
        assert response is not None
        sizes.append(len(response.events))
    assert sizes == [MAX_ENTRIES_PER_MESSAGE, 5]


async def test_relaxed_news_travels_with_other_news_or_after_a_short_while() -> None:
    outbox = Outbox(100)
    outbox.put_success(1, relaxed=True)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put_event(event())
    response = await taking
    assert response is not None
    assert (list(response.succeeded), len(response.events)) == ([1], 1)
    begin_s = time.monotonic()
    outbox.put_success(2, relaxed=True)
    outbox.put_success(3, relaxed=True)
    response = await asyncio.wait_for(outbox.take(), 5.0)
    assert response is not None
    assert list(response.succeeded) == [2, 3]
    assert time.monotonic() - begin_s >= RELAXED_DELAY_S * 0.9


async def test_overflow_ends_the_stream_and_room_comes_back() -> None:
    outbox = Outbox(2)
    for _ in range(3):
        for number in range(2):
            outbox.put_event(event(number))
        assert await outbox.take() is not None
    assert not outbox.overflowed
    for number in range(3):
        outbox.put_event(event(number))
    assert outbox.overflowed
    assert await outbox.take() is None
    relaxed = Outbox(1)
    relaxed.put_success(1, relaxed=True)
    relaxed.put_success(2, relaxed=True)
    assert await relaxed.take() is None


async def test_closing_lets_what_is_there_out_first() -> None:
    outbox = Outbox(10)
    outbox.put_success(1, relaxed=True)
    outbox.close()
    assert await outbox.take() is not None
    assert await outbox.take() is None
