"""Ties a process to its parent, so that a killed driver leaves nothing behind."""

import ctypes
import os
import signal

from rd2h.errors import Rd2hError

_PR_SET_PDEATHSIG = 1


class LaunchError(Rd2hError):
    """A process of the demo could not be started, or ended before it was ready."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent ends, however the parent ends (Linux only).

    `parent_pid` is the parent that the caller expects; when that one is already gone this process ends at once.
    The kernel means the parent's *thread* that made this process: start processes from a thread that lives on.
    Raises LaunchError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise LaunchError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def forked_children_die_too() -> None:
    """From here on, every process that this one forks dies with it (vLLM's engine core and workers)."""
    os.register_at_fork(after_in_child=die_with_parent)
