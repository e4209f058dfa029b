"""One event loop on one thread for all background clients of a process.

grpc.aio keeps one completion queue for the whole process and hands completions to the loop they belong to; a loop that
is closed while a completion is under way makes it log errors on every other loop. So this loop, once started, lives as
long as the process. It sleeps in the kernel while nothing happens.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading

_lock = threading.Lock()
_running: LoopThread | None = None

_EXIT_TIMEOUT_S = 2.0


class LoopThread:
    """The thread and its loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        """Process that started it; a forked child needs its own."""
        self.loop = asyncio.new_event_loop()
        """The loop; use its thread-safe methods only."""
        self._thread = threading.Thread(target=self._run, name="rd2h-meta-client", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop at the end of the process."""
        if self.pid == os.getpid() and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_EXIT_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the process's background loop; start it on first use."""
    global _running
    with _lock:
        if _running is None or _running.pid != os.getpid():
            _running = LoopThread()
            atexit.register(_running.stop)
        return _running.loop
