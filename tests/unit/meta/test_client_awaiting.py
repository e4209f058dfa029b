"""The waiting side: no duplicates, and conclusions that a restarted service cannot draw."""

import asyncio

import grpc
import pytest
from meta_builders import child, kind
from rd2h_client.awaiting import ChildrenIterator
from rd2h_client.errors import MetaRefusedError
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    ChildEnded,
    Outcome,
    RendezvousClosed,
    RendezvousComplete,
    RendezvousEvent,
)


def make(expected: int = 2) -> ChildrenIterator:
    return ChildrenIterator("r", expected, lambda rid: None, asyncio.get_running_loop())


def advertised(name: str) -> RendezvousEvent:
    return RendezvousEvent(rendezvous_id="r", advertised=child(name))


def ended(name: str, outcome: Outcome = OUTCOME_DONE, reason: str = "") -> RendezvousEvent:
    return RendezvousEvent(rendezvous_id="r", child_ended=ChildEnded(request_id=name, outcome=outcome, reason=reason))


COMPLETE = RendezvousEvent(rendezvous_id="r", complete=RendezvousComplete(live_children=2))
CLOSED = RendezvousEvent(rendezvous_id="r", closed=RendezvousClosed(outcome=OUTCOME_DONE))


async def story(iterator: ChildrenIterator) -> list[str]:
    return [kind(event) async for event in iterator]


async def test_events_pass_once_and_closed_is_the_last() -> None:
    iterator = make()
    for event in [advertised("a"), advertised("b"), COMPLETE, ended("a")]:
        for _ in range(2):
            assert not iterator.offer(event)
    assert iterator.offer(ended("b"))
    assert await story(iterator) == [
        "advertised a", "advertised b", "complete 2", "ended a DONE", "ended b DONE", "closed DONE",
    ]  # fmt: skip


async def test_an_advert_replayed_after_the_end_of_its_child_says_nothing() -> None:
    iterator = make()
    iterator.offer(ended("a"))
    iterator.offer(advertised("a"))
    iterator.offer(CLOSED)
    assert await story(iterator) == ["ended a DONE", "closed DONE"]


async def test_it_concludes_what_follows_from_the_children() -> None:
    iterator = make()
    iterator.offer(advertised("a"))
    iterator.offer(ended("a", OUTCOME_ABORTED, "client left"))
    iterator.offer(advertised("b"))
    assert iterator.offer(ended("b"))
    events = [event async for event in iterator]
    assert [kind(event) for event in events] == [
        "advertised a", "ended a ABORTED", "advertised b", "complete 1", "ended b DONE", "closed ABORTED",
    ]  # fmt: skip
    assert events[-1].closed.reason == "client left"


async def test_children_that_all_ended_before_they_advertised() -> None:
    iterator = make()
    iterator.offer(ended("a"))
    assert iterator.offer(ended("b"))
    assert await story(iterator) == ["ended a DONE", "ended b DONE", "complete 0", "closed DONE"]


async def test_a_rendezvous_that_the_service_closes_ends_without_its_children() -> None:
    iterator = make()
    iterator.offer(advertised("a"))
    assert iterator.offer(CLOSED)
    assert await story(iterator) == ["advertised a", "closed DONE"]


async def test_waits_for_events_and_ends_early() -> None:
    forgotten: list[str] = []
    iterator = ChildrenIterator("r", 2, forgotten.append, asyncio.get_running_loop())
    waiting = asyncio.create_task(anext(iterator))
    await asyncio.sleep(0)
    iterator.offer(advertised("a"))
    assert kind(await waiting) == "advertised a"
    waiting = asyncio.create_task(anext(iterator))
    await asyncio.sleep(0)
    await iterator.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert forgotten == ["r"]


async def test_a_refusal_is_raised_after_what_came_before_it() -> None:
    iterator = make()
    iterator.offer(advertised("a"))
    iterator.fail(MetaRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "bad"))
    assert kind(await anext(iterator)) == "advertised a"
    with pytest.raises(MetaRefusedError, match="bad"):
        await anext(iterator)


async def test_unknown_events_of_a_newer_service_are_ignored() -> None:
    iterator = make()
    assert not iterator.offer(RendezvousEvent(rendezvous_id="r"))
    iterator.offer(CLOSED)
    assert await story(iterator) == ["closed DONE"]


async def test_an_outcome_of_a_newer_service_counts_as_the_worst() -> None:
    iterator = make()
    iterator.offer(ended("a", 9, "something new"))  # type: ignore[arg-type]  # open enums take any number
    assert iterator.offer(ended("b", OUTCOME_ABORTED))
    *_, last = [event async for event in iterator]
    assert (last.closed.outcome, last.closed.reason) == (9, "something new")


async def test_an_iterator_that_is_over_forgets_no_later_await_of_the_same_rendezvous() -> None:
    forgotten: list[str] = []
    loop = asyncio.get_running_loop()
    over = ChildrenIterator("r", 1, forgotten.append, loop)
    assert over.offer(ended("a"))
    await over.aclose()
    refused = ChildrenIterator("r", 1, forgotten.append, loop)
    refused.fail(MetaRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "bad"))
    await refused.aclose()
    assert forgotten == []
    early = ChildrenIterator("r", 1, forgotten.append, loop)
    await early.aclose()
    await early.aclose()
    assert forgotten == ["r"]


async def test_a_service_that_tells_of_ever_more_children_fills_no_memory() -> None:
    iterator = make(expected=2)
    for name in "abcd":  # as many again may come from another Decode after a restart of the service
        iterator.offer(advertised(name))
    with pytest.raises(ValueError, match="expected 2"):
        iterator.offer(advertised("e"))


async def test_what_a_caller_does_with_an_event_changes_no_conclusion() -> None:
    iterator = make(expected=2)
    iterator.offer(ended("a", OUTCOME_ABORTED, "left"))
    event = await anext(iterator)
    event.child_ended.outcome = OUTCOME_DONE
    event.child_ended.reason = "mine"
    assert iterator.offer(ended("b"))
    *_, last = [event async for event in iterator]
    assert (last.closed.outcome, last.closed.reason) == (OUTCOME_ABORTED, "left")
