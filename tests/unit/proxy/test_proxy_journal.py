"""The records of requests."""

from rd2h_proxy.journal import Journal
from rd2h_proxy.phase import Phase


def test_a_long_reason_is_cut_because_finished_records_are_kept() -> None:
    journal = Journal()
    record = journal.begin("id", "/v1/completions")
    journal.finish(record, Phase.FAILED, 502, "x" * 1_000_000)
    assert not journal.in_flight
    assert 100 < len(journal.recent[0].reason) <= 1000
