"""Whatever ends the driver of engines, no process of it is left; if it can still act, no temporary file either."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
GONE_S = 30.0

DRIVER = textwrap.dedent("""
    import signal, sys
    from pathlib import Path
    from rd2h.demo.engine_spec import EngineSpec
    from rd2h.demo.launcher import Launcher
    from rd2h.demo.model import model_dir
    # A test run in the background of a shell inherits an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Launcher(Path(sys.argv[1])) as launcher:
        engine = launcher.start_engine(EngineSpec("e", model_dir()))
        launcher.wait_engines([engine])
        print("ready", flush=True)
        sys.stdin.readline()
        raise RuntimeError("on purpose")
""")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files, with a name short enough for vLLM's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def stat_of(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, start time) of a process; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[19])


def descendants(root: int) -> dict[int, int]:
    """Start times of all processes below one, by id."""
    stats = {int(folder.name): stat_of(int(folder.name)) for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    found: dict[int, int] = {}
    parents = {root}
    while parents:
        below = {pid: stat[2] for pid, stat in stats.items() if stat is not None and stat[1] in parents}
        found.update(below)
        parents = set(below)
    return found


def still_running(processes: dict[int, int]) -> list[int]:
    left = []
    for pid, start_time in processes.items():
        stat = stat_of(pid)
        if stat is not None and stat[0] != "Z" and stat[2] == start_time:
            left.append(pid)
    return left


@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGKILL], ids=["failure", "ctrl-c", "kill -9"])
def test_driver_of_an_engine(tmp_path: Path, scratch: Path, end: signal.Signals | None) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    pipe = subprocess.PIPE
    env = {**os.environ, "TMPDIR": str(scratch)}
    driver = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        assert driver.stdout is not None
        assert driver.stdin is not None
        assert driver.stdout.readline() == "ready\n"
        processes = descendants(driver.pid)
        # Fork server, API server, engine core.
        assert len(processes) >= 3
        assert list(scratch.rglob("*-*-*-*-*")), "vLLM has no sockets there, so this looks at the wrong folder"
        if end is None:
            driver.stdin.write("fail\n")
            driver.stdin.flush()
        else:
            driver.send_signal(end)
        assert driver.wait(GONE_S) == (1 if end is None else -end)
    finally:
        driver.kill()
        driver.communicate()
    deadline = time.monotonic() + GONE_S
    while left := still_running(processes):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    if end is not signal.SIGKILL:
        assert list(scratch.iterdir()) == []


@pytest.mark.pd
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_demo_that_is_interrupted(tmp_path: Path, scratch: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "rd2h.cli", "demo", "--log-dir", str(tmp_path)]
    env = {**os.environ, "TMPDIR": str(scratch)}
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "engines start" in line:
                break
        processes = descendants(demo.pid)
        # Meta service, fork server, four engines.
        assert len(processes) >= 6
        demo.send_signal(end)
        assert "interrupted; every process is stopped" in demo.stdout.read()
        assert demo.wait(GONE_S) == 130
    finally:
        demo.kill()
        demo.communicate()
    assert still_running(processes) == []
    assert list(scratch.iterdir()) == []
