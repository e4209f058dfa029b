"""Binding the data path's own threads to processors.

A layer's message passes from ZeroMQ's I/O thread to a thread of ours and back. On one processor these hand-overs are
cheap and find their memory in its cache; left alone, the kernel spreads them over idle processors and wakes one each
time.
"""

import os
import threading
from collections.abc import Collection
from typing import Any

import zmq

from rd2h.errors import ConfigError


def bind_this_thread(cpus: Collection[int]) -> None:
    """Let the calling thread run on these processors only; with none given, leave it as it is."""
    if cpus:
        os.sched_setaffinity(0, cpus)  # on Linux 0 is the calling thread


def bind_io_threads(context: "zmq.Context[Any]", cpus: Collection[int]) -> None:
    """The same for the I/O threads of a context that has no socket yet."""
    for cpu in cpus:
        context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)


def check_cpus(key: str, cpus: Collection[int]) -> None:
    """Raise ConfigError naming ``key`` for processors on which this process may not run."""
    refused: list[int] = []

    def attempt() -> None:
        for cpu in cpus:
            try:
                os.sched_setaffinity(0, {cpu})
            except OSError:
                refused.append(cpu)

    # In a thread of its own, so that the caller's affinity stays as it is.
    thread = threading.Thread(target=attempt, name="rd2h-cpu-check")
    thread.start()
    thread.join()
    if refused:
        raise ConfigError.bad_value(key, sorted(cpus), f"processors this process may use (not {refused})")
