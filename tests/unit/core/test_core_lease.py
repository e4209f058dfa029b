"""Bytes are used only while Prefill cannot have given this Decode up."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.lease import ReadLease

SECOND = 1_000_000_000
PEER_TIMEOUT_S = 20.0


def test_no_lease_before_the_first_echo() -> None:
    lease = ReadLease.of(PEER_TIMEOUT_S)
    assert not lease.valid(0)
    assert not lease.valid(5 * SECOND)


def test_half_of_the_peer_timeout_from_the_sending_of_the_ping() -> None:
    lease = ReadLease.of(PEER_TIMEOUT_S)
    lease.echoed(100 * SECOND, 103 * SECOND)
    assert lease.valid(103 * SECOND)
    assert lease.valid(110 * SECOND - 1)
    assert not lease.valid(110 * SECOND), "the time on the way does not count for us"


def test_echoes_that_waited_while_decode_was_stopped_prolong_nothing() -> None:
    """Case P10: five echoes lie in the socket when Decode wakes after a minute."""
    lease = ReadLease.of(PEER_TIMEOUT_S)
    woken = 160 * SECOND
    for sent in range(100, 105):
        lease.echoed(sent * SECOND, woken)
    assert not lease.valid(woken)
    assert not lease.valid(woken + SECOND)
    lease.echoed(woken + SECOND, woken + 2 * SECOND)
    assert lease.valid(woken + 2 * SECOND), "a new round trip is needed, and enough"


def test_old_and_repeated_echoes_do_not_move_the_lease() -> None:
    lease = ReadLease.of(PEER_TIMEOUT_S)
    lease.echoed(50 * SECOND, 51 * SECOND)
    for sent in (50, 49, 0):
        lease.echoed(sent * SECOND, 59 * SECOND)
        assert lease.start_ns == 50 * SECOND


def test_a_time_that_was_never_sent_is_ignored() -> None:
    lease = ReadLease.of(PEER_TIMEOUT_S)
    lease.echoed(10 * SECOND, 9 * SECOND)
    assert not lease.valid(11 * SECOND)
    lease.echoed((1 << 64) - 1, 9 * SECOND)
    assert not lease.valid(11 * SECOND)


@settings(deadline=None, max_examples=300)
@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.integers(0, 10 * SECOND), st.integers(0, 30 * SECOND)), min_size=1, max_size=10),
    st.integers(0, 60 * SECOND),
)
def test_while_the_lease_runs_prefill_has_heard_a_ping_within_its_timeout(
    peer_timeout_s: float, pings: list[tuple[int, int]], wait_ns: int
) -> None:
    """Each ping takes any time to Prefill and back; Prefill counts from when it heard the last one."""
    lease = ReadLease.of(peer_timeout_s)
    now, heard = 0, -1
    for to_prefill, back in pings:
        sent = now
        heard = sent + to_prefill
        now = heard + back
        lease.echoed(sent, now)
    for at in (now, now + wait_ns):
        if lease.valid(at):
            assert at - heard < peer_timeout_s * 1e9 / 2 + 1
