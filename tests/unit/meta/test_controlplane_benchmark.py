"""What the control-plane benchmark says about its targets."""

import json

import pytest

from benchmarks import controlplane
from benchmarks.controlplane import CONCURRENCIES, SYSTEMS, Row


def measured(rounds: int, duration_s: float) -> list[Row]:
    """Every system is as fast as every other: all targets are missed."""
    return [Row(system.name, concurrency, 100.0, 200.0, 1_000.0) for concurrency in CONCURRENCIES for system in SYSTEMS]


def test_a_full_run_is_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(controlplane, "run", measured)
    assert controlplane.main([]) == 0
    assert capsys.readouterr().out.count("MISSED") == 5
    assert controlplane.main(["--json"]) == 0
    assert [target["met"] for target in json.loads(capsys.readouterr().out)["targets"]] == [False] * 5


def test_a_quick_run_is_too_rough_to_be_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controlplane, "run", measured)
    assert controlplane.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "floor" in printed
    assert "MISSED" not in printed
    assert "met " not in printed
    assert controlplane.main(["--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["rows"]) == 12
    assert result["targets"] == []
