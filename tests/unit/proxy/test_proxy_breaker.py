"""Breaker transitions."""

from rd2h_proxy.breaker import Breaker, BreakerOptions, BreakerState

OPTIONS = BreakerOptions(failures_to_open=2, first_pause_s=1.0, longest_pause_s=3.0)


def opened() -> Breaker:
    breaker = Breaker(OPTIONS)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert opened().state is BreakerState.OPEN
    assert not opened().allows(0.9)


def test_one_trial_passes_after_the_pause_and_decides() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    breaker.started(1.0)
    assert breaker.state is BreakerState.TRIAL
    assert not breaker.allows(1.0)
    breaker.succeeded()
    assert breaker.allows(1.0)


def test_failed_trials_lengthen_the_pause_to_a_limit() -> None:
    breaker = opened()
    now = 0.0
    for pause in (1.0, 2.0, 3.0, 3.0):
        assert not breaker.allows(now + pause - 0.01)
        now += pause
        assert breaker.allows(now)
        breaker.started(now)
        breaker.failed(now)


def test_a_trial_whose_client_went_away_lets_the_next_one_through() -> None:
    breaker = opened()
    breaker.started(1.0)
    breaker.abandoned()
    assert breaker.allows(1.0)
