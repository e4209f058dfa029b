"""Deadlines of many keys."""

from hypothesis import given
from hypothesis import strategies as st
from rd2h_meta.expiry import ExpiryQueue


def test_due_keys_come_once_and_earliest_first() -> None:
    queue: ExpiryQueue[str] = ExpiryQueue()
    for key, deadline_s in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        queue.set(key, deadline_s)
    assert queue.next_deadline_s() == 1.0
    assert queue.pop_due(2.0) == ["a", "b"]
    assert queue.pop_due(2.0) == []
    assert len(queue) == 1


def test_a_moved_deadline_counts_alone() -> None:
    queue: ExpiryQueue[str] = ExpiryQueue()
    queue.set("a", 1.0)
    queue.set("a", 5.0)
    assert queue.pop_due(4.0) == []
    assert queue.pop_due(5.0) == ["a"]


def test_a_discarded_key_never_comes() -> None:
    queue: ExpiryQueue[str] = ExpiryQueue()
    queue.set("a", 1.0)
    queue.discard("a")
    queue.discard("never there")
    assert queue.next_deadline_s() is None
    assert queue.pop_due(9.0) == []


def test_shift_moves_every_deadline() -> None:
    queue: ExpiryQueue[str] = ExpiryQueue()
    queue.set("a", 1.0)
    queue.set("b", 2.0)
    queue.shift(10.0)
    assert queue.pop_due(10.9) == []
    assert queue.pop_due(12.0) == ["a", "b"]


def test_memory_follows_the_live_keys_not_the_history() -> None:
    queue: ExpiryQueue[int] = ExpiryQueue()
    for number in range(100_000):
        queue.set(number, 1e9 + number)
        queue.discard(number)
    assert len(queue._heap) < 200
    for _ in range(10_000):
        queue.set(0, 1e9 + _)
    assert len(queue._heap) < 200


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, 9), st.integers(0, 50)),
            st.tuples(st.just("discard"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("pop"), st.just(0), st.integers(0, 50)),
        )
    )
)
def test_behaves_like_a_dictionary_of_deadlines(steps: list[tuple[str, int, int]]) -> None:
    queue: ExpiryQueue[int] = ExpiryQueue()
    model: dict[int, float] = {}
    for step, key, number in steps:
        if step == "set":
            queue.set(key, float(number))
            model[key] = float(number)
        elif step == "discard":
            queue.discard(key)
            model.pop(key, None)
        else:
            due = {name for name, deadline_s in model.items() if deadline_s <= number}
            assert set(queue.pop_due(float(number))) == due
            model = {name: deadline_s for name, deadline_s in model.items() if name not in due}
        assert len(queue) == len(model)
        assert queue.next_deadline_s() == min(model.values(), default=None)
