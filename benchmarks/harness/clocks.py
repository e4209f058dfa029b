"""CPU clocks of other processes, and what machine this is."""

import os
import platform
import time
from pathlib import Path

import numpy
import zmq


def process_cpu_s(pid: int) -> float:
    """CPU time in seconds that all threads of a process have used, ZeroMQ's own thread included.

    Linux numbers the CPU clock of a process by its id (clock_getcpuclockid(3)); 2 selects scheduler time.
    """
    return time.clock_gettime((~pid << 3) | 2)


def describe_machine() -> dict[str, object]:
    """Facts that figures depend on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
