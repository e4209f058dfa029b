"""The benchmark of the proxy runs and gives the rows that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_choice_spreads_work_better_than_round_robin_and_random() -> None:
    code = "import json; from benchmarks.proxy import choice_rows; print(json.dumps(choice_rows(10_000)))"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = {row["way"]: row for row in json.loads(made.stdout)}
    ours = rows["least_work"]
    for other in ("round_robin", "random"):
        assert ours["assigned_max_over_mean"] < rows[other]["assigned_max_over_mean"]
        assert ours["mean_max_backlog"] < 0.6 * rows[other]["mean_max_backlog"]
        assert ours["wait_p99"] < 0.3 * rows[other]["wait_p99"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_streams_and_latency() -> None:
    command = [sys.executable, "-m", "benchmarks.proxy", "--json"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(made.stdout)["rows"]
    (streams,) = (row for row in rows if row["case"] == "streams")
    assert streams["finished"] == streams["streams"] == 1500
    assert streams["all_open_at_once"]
    assert streams["memory_bytes_per_stream"] < 100_000
    latency = {row["way"]: row for row in rows if row["case"] == "latency"}
    assert latency["proxy"]["added_over_bare"] <= 1.5
    assert latency["proxy_keeping_token_ids"]["added_over_bare"] <= 1.5
