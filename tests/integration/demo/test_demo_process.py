"""Processes of the demo: readiness, errors with the log, and nothing left behind when the driver is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rd2h.demo.lifetime import LaunchError
from rd2h.demo.ports import free_port
from rd2h.demo.process import start_child

DEADLINE_S = 20.0


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ready_stop_and_exit_code(tmp_path: Path) -> None:
    port = free_port()
    process = start_child(
        "files", ["http.server", str(port), "--bind", "127.0.0.1"], tmp_path / "log", url=f"http://127.0.0.1:{port}"
    )
    try:
        process.wait_ready(DEADLINE_S, path="/")
        assert process.alive
    finally:
        process.stop()
    assert process.poll() == -signal.SIGTERM
    process.stop()


def test_end_before_ready_shows_the_log(tmp_path: Path) -> None:
    process = start_child("broken", ["no_such_module_of_ours"], tmp_path / "log", url="http://127.0.0.1:9")
    with pytest.raises(LaunchError, match=r"broken ended with code 1(.|\n)*no_such_module_of_ours"):
        process.wait_ready(DEADLINE_S)


def test_stop_kills_the_whole_group(tmp_path: Path) -> None:
    package = tmp_path / "stubborn.py"
    package.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            print(os.getpid(), flush=True)
        time.sleep(600)
        """)
    )
    log = tmp_path / "log"
    process = start_child("stubborn", ["stubborn"], log, env={"PYTHONPATH": str(tmp_path)})
    wait_until(lambda: log.read_text().strip().isdigit(), "grandchild reports its id")
    grandchild = int(log.read_text())
    process.stop(grace_s=0.2)
    assert process.poll() == -signal.SIGKILL
    wait_until(lambda: not running(grandchild), "grandchild is gone")


def test_killed_driver_takes_its_children_along(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    driver = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from rd2h.demo.process import start_child
        child = start_child("s", ["sleeper"], Path({str(tmp_path / "log")!r}), env={{"PYTHONPATH": {str(tmp_path)!r}}})
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        child = int(popen.stdout.readline())
        # Not before it had the chance to bind itself to the driver.
        wait_until(lambda: b"sleeper" in Path(f"/proc/{child}/cmdline").read_bytes(), "child started")
        os.kill(popen.pid, signal.SIGKILL)
        popen.wait()
    wait_until(lambda: not running(child), "child is gone")
