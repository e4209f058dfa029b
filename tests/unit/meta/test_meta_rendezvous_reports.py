"""Failures that are reported for several children at once."""

import pytest
from meta_builders import PROXY, RendezvousBench
from rd2h_meta.errors import PreconditionError


@pytest.mark.parametrize("ids", [["x", "a", "b"], ["a", "x", "b"], ["a", "b", "x"]])
def test_a_report_that_names_one_child_too_many_still_ends_the_others(ids: list[str]) -> None:
    bench = RendezvousBench()
    bench.await_(2)
    bench.advertise("a", "b")
    bench.story(PROXY)
    with pytest.raises(PreconditionError, match="all 2 expected children are known already"):
        bench.table.report_failure("r", ids, "prefill 500", 0.0)
    assert bench.story(PROXY) == ["ended a FAILED", "ended b FAILED", "closed FAILED"]
    assert bench.table.open_count == 0


def test_children_that_were_never_advertised_count_as_far_as_they_are_expected() -> None:
    bench = RendezvousBench()
    bench.await_(2)
    with pytest.raises(PreconditionError):
        bench.table.report_failure("r", ["x", "y", "z"], "prefill 500", 0.0)
    assert bench.story(PROXY) == ["ended x FAILED", "ended y FAILED", "complete 0", "closed FAILED"]
    assert bench.table.open_count == 0
