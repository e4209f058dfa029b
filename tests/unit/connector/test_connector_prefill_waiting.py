"""Prefill's scheduler half: a request whose Decode is not seen in the registry yet waits a short while, alone."""

import pytest
from connector_standins import GENERATION, P, RecordingControl, blocks, child_params, dispatch, prefill_half, scheduled

from rd2h.control import DecodeAddress, Registered
from rd2h.prefill import scheduler as scheduler_module

WAIT_S = 2.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def unregistered() -> RecordingControl:
    return RecordingControl(now_registered=Registered())


def register(control: RecordingControl, port: int = 20050) -> None:
    known = control.now_registered.decode_addresses
    control.now_registered = Registered(frozenset(), known | {DecodeAddress(GENERATION, "10.0.0.2", port)})


def test_a_decode_that_the_watch_tells_of_in_time_is_served(clock: Clock) -> None:
    control = unregistered()
    half = prefill_half(control, registration_wait_s=WAIT_S, clock=clock)
    params = dispatch(child_params())
    assert not half.ready(P, params)
    clock.now_s += WAIT_S - 0.01
    assert not half.ready(P, params)
    register(control)
    assert half.ready(P, params)
    half.track(P, params, 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert len(step.publications) == 1
    assert control.failures == []


def test_a_decode_that_does_not_appear_is_refused_as_ever(clock: Clock) -> None:
    control = unregistered()
    half = prefill_half(control, registration_wait_s=WAIT_S, clock=clock)
    params = dispatch(child_params())
    assert not half.ready(P, params)
    clock.now_s += WAIT_S
    assert half.ready(P, params)
    half.track(P, params, 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert (step.publications, step.failures) == ([], [])
    ((_, children, reason),) = control.failures
    assert children == ("cmpl-x-0-aaaaaaaa",)
    assert reason == f"no Decode of generation {GENERATION} is registered at 10.0.0.2:20050"
    # Resumed after a preemption: nothing is waited for again.
    assert half.ready(P, params)


def test_one_unseen_child_of_several_makes_its_request_wait_and_once_over_it_is_over(clock: Clock) -> None:
    control = RecordingControl()
    half = prefill_half(control, registration_wait_s=WAIT_S, clock=clock)
    params = dispatch(child_params("a", 1), child_params("b", 2, remote_port=30000))
    assert not half.ready(P, params)
    clock.now_s += WAIT_S
    # Blocks may be short now, so vLLM asks again and again.
    assert half.ready(P, params)
    assert half.ready(P, params)


def test_nobody_waits_for_what_waiting_cannot_change(clock: Clock) -> None:
    legacy = child_params(generation=None)
    del legacy["token"]
    for params in (
        dispatch(child_params()),
        dispatch(legacy),
        dispatch(child_params(prompt_index=-1)),
        dispatch(child_params("a", 1), child_params("b", 2, prompt_index=1), x_request_id="other"),
        {},
    ):
        assert prefill_half(RecordingControl(), registration_wait_s=WAIT_S, clock=clock).ready(P, params)
    assert prefill_half(None, registration_wait_s=WAIT_S, clock=clock).ready(P, dispatch(child_params()))
    lax = prefill_half(unregistered(), registration_wait_s=WAIT_S, clock=clock, require_registered=False)
    assert lax.ready(P, dispatch(child_params()))
    assert prefill_half(unregistered(), registration_wait_s=0.0, clock=clock).ready(P, dispatch(child_params()))


def test_a_request_that_ends_while_it_waits_is_forgotten(clock: Clock) -> None:
    """The same id may come again, and its wait begins anew."""
    half = prefill_half(unregistered(), registration_wait_s=WAIT_S, clock=clock)
    params = dispatch(child_params())
    assert not half.ready(P, params)
    half.finished(P, params)
    assert half._arrivals == {}
    clock.now_s += WAIT_S
    assert not half.ready(P, params)


def test_asking_again_costs_no_parsing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a long list names every child of the list, and vLLM may ask a thousand times a second."""
    parsed: list[int] = []
    parse = scheduler_module.parse_remote_decodes
    monkeypatch.setattr(scheduler_module, "parse_remote_decodes", lambda params: parsed.append(1) or parse(params))
    control = unregistered()
    half = prefill_half(control, registration_wait_s=WAIT_S, clock=clock)
    params = dispatch(child_params())
    for _ in range(10):
        half.ready(P, params)
    register(control)
    assert half.ready(P, params)
    half.track(P, params, 16)
    assert len(parsed) == 1
