"""Processes that act as sources of the host engine."""

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("host_source_process.py")
DEADLINE_S = 60
SEED = 20_240_607


@dataclass
class Source:
    """A running source process."""

    process: subprocess.Popen
    session: str
    addr: int
    size: int
    seed: int = SEED

    @property
    def pid(self):
        return self.process.pid

    def command(self, do, **fields):
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        return read_line(self.process)

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)


def read_line(process):
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    assert ready, f"the source process said nothing within {DEADLINE_S} s"
    line = process.stdout.readline()
    assert line, f"the source process ended with {process.wait(DEADLINE_S)}"
    return json.loads(line)


@pytest.fixture
def start_source():
    """Starts sources; all are stopped by process id at the end of the test."""
    started = []

    def start(size=1 << 20, filled=None, **settings):
        filled = [(0, size)] if filled is None else filled
        argument = json.dumps({"size": size, "filled": filled, "seed": SEED, **settings})
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        hello = read_line(process)
        return Source(process, hello["session"], hello["addr"], size)

    yield start
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdin.close()
        process.stdout.close()
