"""Waves: every child goes to Prefill exactly once, in one wave when all can be there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rd2h_client.v1.rendezvous_pb2 import Child
from rd2h_proxy.gathering import BadAdvertError, Gathering


def child(prompt: int, choice: int = 0, name: str = "") -> Child:
    return Child(request_id=name or f"{choice}_r-{prompt}", prompt_index=prompt, choice_index=choice)


def ids(children: list[Child]) -> list[str]:
    return [entry.request_id for entry in children]


def test_all_children_make_one_wave_at_once() -> None:
    gathering = Gathering(prompts=2, n=1, window_s=0.2)
    gathering.advertised(child(1), 10.0)
    assert gathering.due_at() == 10.2
    gathering.advertised(child(0), 10.1)
    assert gathering.due_at() == 0.0
    assert ids(gathering.take_wave()) == ["0_r-0", "0_r-1"]
    assert gathering.accounted
    assert gathering.due_at() is None


def test_silence_sends_what_is_there_and_the_rest_later() -> None:
    gathering = Gathering(prompts=3, n=1, window_s=0.2)
    gathering.advertised(child(2), 1.0)
    assert ids(gathering.take_wave()) == ["0_r-2"]
    assert not gathering.accounted
    gathering.advertised(child(0), 5.0)
    gathering.advertised(child(1), 5.0)
    assert gathering.due_at() == 0.0
    assert ids(gathering.take_wave()) == ["0_r-0", "0_r-1"]


def test_a_child_that_ends_before_it_advertises_holds_nobody_up() -> None:
    gathering = Gathering(prompts=2, n=1, window_s=9.0)
    gathering.ended("x", 0, 0, done=True)
    gathering.advertised(child(1), 1.0)
    assert gathering.due_at() == 0.0
    assert ids(gathering.take_wave()) == ["0_r-1"]


def test_a_child_that_ends_while_it_waits_is_not_sent() -> None:
    gathering = Gathering(prompts=2, n=1, window_s=9.0)
    gathering.advertised(child(0), 1.0)
    gathering.ended("0_r-0", 0, 0, done=False)
    assert gathering.due_at() is None


def test_a_second_child_for_one_place_and_indices_out_of_range_are_refused() -> None:
    gathering = Gathering(prompts=1, n=2, window_s=1.0)
    gathering.advertised(child(0, 1, "a"), 1.0)
    with pytest.raises(BadAdvertError, match="already taken by a"):
        gathering.advertised(child(0, 1, "b"), 1.0)
    with pytest.raises(BadAdvertError, match="choices below 2"):
        gathering.advertised(child(0, 2, "c"), 1.0)


@settings(max_examples=300)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["advert", "end", "wave", "repeat"]), st.integers(0, 14)), max_size=60),
)
def test_every_live_child_is_sent_exactly_once(prompts: int, n: int, steps: list[tuple[str, int]]) -> None:
    gathering = Gathering(prompts, n, window_s=0.0)
    sent: list[str] = []
    advertised: set[str] = set()
    ended: set[str] = set()
    for kind, number in steps:
        place = child(number % prompts, number // prompts % n)
        if kind in ("advert", "repeat") and place.request_id not in ended:
            gathering.advertised(place, 1.0)
            advertised.add(place.request_id)
        elif kind == "end":
            gathering.ended(place.request_id, place.prompt_index, place.choice_index, done=False)
            ended.add(place.request_id)
        elif kind == "wave" and gathering.due_at() is not None:
            sent += ids(gathering.take_wave())
        assert len(sent) == len(set(sent))
        assert gathering.live == set(sent) - ended
    if gathering.due_at() is not None:
        sent += ids(gathering.take_wave())
    assert advertised - ended <= set(sent) <= advertised


def test_a_child_cannot_be_served_while_it_waits_for_prefill() -> None:
    gathering = Gathering(prompts=2, n=1, window_s=1)
    first, second = Child(request_id="a", prompt_index=0), Child(request_id="b", prompt_index=1)
    gathering.advertised(first, 0.0)
    assert not gathering.ended("a", 0, 0, done=True)
    assert not gathering.served
    gathering.advertised(second, 0.0)
    assert gathering.take_wave() == [second]
    assert gathering.ended("b", 1, 0, done=True)
    assert gathering.served
    assert gathering.all_ended


def test_children_that_wait_when_the_rendezvous_ends_are_not_sent() -> None:
    gathering = Gathering(prompts=2, n=1, window_s=1)
    gathering.advertised(Child(request_id="a", prompt_index=0), 0.0)
    gathering.closed()
    assert gathering.due_at() is None
    assert gathering.dropped
    assert not gathering.all_ended
