"""The rendezvous core is bounded, and refuses what is malformed without a trace."""

import pytest
from meta_builders import PROXY, RendezvousBench, child
from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    WithdrawRequest,
)
from rd2h_meta.errors import EndedError, InvalidFieldError, LimitError
from rd2h_meta.limits import RendezvousLimits


class TestLimits:
    def test_open_rendezvous(self) -> None:
        bench = RendezvousBench(RendezvousLimits(max_open=2, retry_after_s=0.25))
        bench.await_(1, rid="a")
        bench.advertise("x", rid="b")
        for refused in (
            lambda: bench.await_(1, rid="c"),
            lambda: bench.advertise("x", rid="c"),
            lambda: bench.withdraw("x", rid="c"),
        ):
            with pytest.raises(LimitError, match="2 rendezvous are open") as error:
                refused()
            assert error.value.retry_after_s == 0.25
        bench.table.cancel("a", OUTCOME_ABORTED, "", 0.0)
        bench.await_(1, rid="c")

    def test_children(self) -> None:
        bench = RendezvousBench(RendezvousLimits(max_children=2))
        bench.advertise("a", "b")
        with pytest.raises(LimitError, match="2 children, the most allowed"):
            bench.advertise("c")
        with pytest.raises(InvalidFieldError, match=r"expected_children: got 3, allowed: 1\.\.2"):
            bench.await_(3, rid="s")
        with pytest.raises(InvalidFieldError):
            bench.await_(0, rid="s")

    def test_live_children_over_all(self) -> None:
        bench = RendezvousBench(RendezvousLimits(max_live_children=2))
        bench.advertise("a", rid="r")
        bench.advertise("b", rid="s")
        with pytest.raises(LimitError, match="2 children are live"):
            bench.advertise("c", rid="t")
        assert bench.table.open_count == 2
        bench.withdraw("a")
        bench.advertise("c", rid="t")

    def test_memory_is_bounded_and_failures_outlive_successes(self) -> None:
        bench = RendezvousBench(RendezvousLimits(max_remembered=3))
        bench.table.cancel("bad", OUTCOME_ABORTED, "x", 0.0)
        for number in range(50):
            bench.table.cancel(f"r{number}", OUTCOME_DONE, "", 0.0)
        assert bench.table.remembered_count == 4
        with pytest.raises(EndedError):
            bench.advertise("a", rid="bad")

    def test_remembered_children_are_bounded(self) -> None:
        bench = RendezvousBench(RendezvousLimits(max_remembered_children=5))
        for number in range(4):
            bench.advertise("a", "b", rid=f"r{number}")
            bench.table.cancel(f"r{number}", OUTCOME_ABORTED, "x", 0.0)
        assert bench.table.remembered_count == 2

    def test_request_ids(self) -> None:
        bench = RendezvousBench(RendezvousLimits(max_request_ids=2))
        with pytest.raises(InvalidFieldError, match="request_ids"):
            bench.table.report_failure("r", ["a", "b", "c"], "x", 0.0)

    def test_a_thousand_children_complete(self) -> None:
        bench = RendezvousBench()
        bench.await_(1_000)
        bench.advertise(*(f"c{number}" for number in range(1_000)))
        story = bench.story(PROXY)
        assert len(story) == 1_001
        assert story[-1] == "complete 1000"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda table: table.advertise("", child(), 0.0, 1, 0.0), "rendezvous_id"),
        (lambda table: table.advertise("x" * 129, child(), 0.0, 1, 0.0), "rendezvous_id"),
        (lambda table: table.advertise("r", child(tp_size=0), 0.0, 1, 0.0), "child.tp_size"),
        (lambda table: table.await_children("a\n", 1, 0.0, 1, 0.0), "rendezvous_id"),
        (lambda table: table.cancel("", 0, "", 0.0), "rendezvous_id"),
        (lambda table: table.cancel("r", OUTCOME_FAILED, "", 0.0), "outcome"),
        (lambda table: table.report_failure("r", [], "", 0.0), "reason"),
        (lambda table: table.report_failure("r", [""], "x", 0.0), "request_ids"),
        (lambda table: table.withdraw(WithdrawRequest(rendezvous_id="r"), 1, 0.0), "request_id"),
        (
            lambda table: table.withdraw(
                WithdrawRequest(rendezvous_id="r", request_id="a", outcome=OUTCOME_EXPIRED), 1, 0.0
            ),
            "outcome",
        ),
        (
            lambda table: table.withdraw(
                WithdrawRequest(rendezvous_id="r", request_id="a", outcome=1, prompt_index=2**31), 1, 0.0
            ),
            "withdraw.prompt_index",
        ),
    ],
)
def test_malformed_operations_leave_nothing_behind(call, field: str) -> None:  # type: ignore[no-untyped-def]
    bench = RendezvousBench()
    with pytest.raises(InvalidFieldError) as refused:
        call(bench.table)
    assert refused.value.field == field
    assert (bench.table.open_count, bench.table.remembered_count, bench.told) == (0, 0, {})
