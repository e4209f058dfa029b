"""What waits to be written to a stream: batches, bounds, and news that waits for other news."""

import asyncio
import time

from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE, OperationResult
from rd2h_meta.outbox import MAX_ENTRIES_PER_MESSAGE, RELAXED_DELAY_S, Outbox
from rd2h_meta.rendezvous_events import Closed


def event(number: int = 0) -> Closed:
    return Closed(f"r{number}", OUTCOME_DONE, "")


async def test_everything_pending_goes_into_one_message() -> None:
    outbox = Outbox(100)
    outbox.put_event(event(1))
    outbox.note_done(7, relaxed=False)
    outbox.put_refusal(OperationResult(op_id=8, code=3))
    outbox.put_event(event(2))
    response = await outbox.take()
    assert response is not None
    assert [entry.rendezvous_id for entry in response.events] == ["r1", "r2"]
    assert response.operations_done == 7
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
    outbox.note_done(1, relaxed=True)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put_event(event())
    response = await taking
    assert response is not None
    assert (response.operations_done, len(response.events)) == (1, 1)
    begin_s = time.monotonic()
    outbox.note_done(2, relaxed=True)
    outbox.note_done(3, relaxed=True)
    response = await asyncio.wait_for(outbox.take(), 5.0)
    assert response is not None
    assert response.operations_done == 3
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
    refusals = Outbox(1)
    refusals.put_refusal(OperationResult(op_id=1, code=3))
    refusals.put_refusal(OperationResult(op_id=2, code=3))
    assert await refusals.take() is None


async def test_closing_lets_what_is_there_out_first() -> None:
    outbox = Outbox(10)
    outbox.note_done(1, relaxed=True)
    outbox.close()
    assert await outbox.take() is not None
    assert await outbox.take() is None


async def test_an_operation_is_not_counted_as_done_before_its_refusal_is_told() -> None:
    outbox = Outbox(10_000)
    for number in range(MAX_ENTRIES_PER_MESSAGE + 1):
        outbox.put_refusal(OperationResult(op_id=number + 1, code=3))
    outbox.note_done(MAX_ENTRIES_PER_MESSAGE + 1, relaxed=False)
    counts = []
    for _ in range(2):
        response = await outbox.take()
        assert response is not None
        counts.append((len(response.results), response.operations_done))
    assert counts == [(MAX_ENTRIES_PER_MESSAGE, 0), (1, MAX_ENTRIES_PER_MESSAGE + 1)]


async def test_news_that_is_no_news_ends_no_stream() -> None:
    outbox = Outbox(10)
    outbox.note_done(1, relaxed=False)
    assert await outbox.take() is not None
    outbox.note_done(1, relaxed=False)  # a message without operations
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put_event(event())
    assert (await taking) is not None


async def test_nothing_piles_up_for_a_peer_that_does_not_read() -> None:
    outbox = Outbox(3)
    for number in range(50):
        outbox.put_event(event(number))
        outbox.put_refusal(OperationResult(op_id=number + 1, code=3))
        assert len(outbox._refusals) + len(outbox._events) <= 3
    # The writer may be held up in the middle of a message for as long as the connection lives.
    assert outbox.overflowed
    assert await outbox.take() is None


async def test_the_peer_waits_for_room_until_it_has_read() -> None:
    outbox = Outbox(4)
    for number in range(3):
        await outbox.wait_for_room()
        outbox.put_event(event(number))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await outbox.take() is not None
    await asyncio.wait_for(waiting, 5.0)
    assert not outbox.overflowed
