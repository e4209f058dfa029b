"""Who is served next: first come first served, but slow connections leave one thread to the others."""

from rd2h.decode.connection import Connection
from rd2h.decode.service import SLOW_S, ServiceQueue
from rd2h.lease import ReadLease


def connection(read_s: float = 0.0) -> Connection:
    made = Connection(b"", "", ReadLease.of(1.0))
    made.read_s = read_s
    return made


def test_first_come_first_served_up_to_the_limit() -> None:
    queue = ServiceQueue(2)
    a, b, c = connection(), connection(), connection()
    for one in (a, b, c):
        queue.put(one)
    assert queue.take(after=False, slow=False) == (a, False, True)
    assert queue.take(after=False, slow=False) == (b, False, False)
    assert queue.take(after=False, slow=False) == (None, False, False)
    assert queue.others_wait
    assert queue.take(after=True, slow=False) == (c, False, False)


def test_slow_connections_leave_a_thread_and_are_not_forgotten() -> None:
    queue = ServiceQueue(3)
    slow = [connection(SLOW_S) for _ in range(4)]
    for one in slow:
        queue.put(one)
    assert queue.take(after=False, slow=False) == (slow[0], True, True)
    assert queue.take(after=False, slow=False) == (slow[1], True, True)
    assert queue.take(after=False, slow=False) == (None, False, False)
    quick = connection()
    queue.put(quick)
    assert queue.take(after=False, slow=False) == (quick, False, False)
    assert queue.take(after=True, slow=False) == (None, False, False)
    assert queue.take(after=True, slow=True) == (slow[2], True, True)
    assert queue.take(after=True, slow=True) == (slow[3], True, False)


def test_the_only_thread_serves_slow_ones_too() -> None:
    queue = ServiceQueue(1)
    slow = connection(SLOW_S)
    queue.put(slow)
    assert queue.take(after=False, slow=False) == (slow, True, False)


def test_a_connection_that_becomes_quick_again_counts_by_what_it_was_when_it_was_taken() -> None:
    queue = ServiceQueue(2)
    one, other = connection(SLOW_S), connection(SLOW_S)
    queue.put(one)
    queue.put(other)
    assert queue.take(after=False, slow=False) == (one, True, True)
    one.read_s = 0.0
    queue.put(one)
    assert queue.take(after=False, slow=False) == (one, False, False)
    assert queue.take(after=True, slow=True) == (other, True, False)
