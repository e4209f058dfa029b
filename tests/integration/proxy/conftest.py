"""One meta service for all tests that leave it alone: rendezvous ids are random, so they do not meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from proxy_harness import META_COMMAND


@pytest.fixture(scope="session")
def meta() -> Iterator[str]:
    """host:port of a running meta service."""
    command = [sys.executable, *META_COMMAND, "--listen", "127.0.0.1:0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving on" in line, line
        yield line.split("serving on ")[1].strip()
        process.kill()
