"""`rd2h status`: what the command line takes."""

from __future__ import annotations

import argparse

import pytest
from rd2h_client import status_cli


@pytest.mark.parametrize("flag", ["--interval-s", "--deadline-s"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1", "1e300", "86401"])
def test_times_that_cannot_be_waited_are_one_line_errors(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    status_cli.add_arguments(parser)
    # Nothing listens there; an accepted value would be exit status 1, or an endless watch.
    line = ["grpc://127.0.0.1:1", "--deadline-s", "0.1"] if flag == "--interval-s" else ["grpc://127.0.0.1:1"]
    assert status_cli.run(parser.parse_args([*line, f"{flag}={value}"])) == 2
    said = capsys.readouterr().err
    assert said == f"rd2h status: {flag}: got {float(value):g}, allowed: seconds above 0 and up to 86400\n"


def test_usual_times_are_taken() -> None:
    parser = argparse.ArgumentParser()
    status_cli.add_arguments(parser)
    arguments = ["grpc://127.0.0.1:1", "--deadline-s", "0.2", "--interval-s", "0.5"]
    assert status_cli.run(parser.parse_args(arguments)) == 1
