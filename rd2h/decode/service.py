"""Which connections have work, and how many threads serve one now."""

import threading
from collections import deque

from rd2h.decode.connection import Connection


class ServiceQueue:
    """Connections that wait to be served, first come first served, by at most ``limit`` threads at a time.

    A connection is in here at most once (it is ``busy`` then), so the queue is as bounded as the connections are.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[Connection] = deque()
        self._serving = 0

    def put(self, connection: Connection) -> None:
        """Add a connection that became busy."""
        with self._lock:
            self._waiting.append(connection)

    def take(self, *, after: bool) -> tuple[Connection | None, bool]:
        """The next connection to serve, and whether another thread is needed too.

        ``after``: the calling thread has just served one. When it gets None it serves nothing any more.
        """
        with self._lock:
            if after:
                self._serving -= 1
            if not self._waiting or self._serving >= self._limit:
                return None, False
            self._serving += 1
            return self._waiting.popleft(), bool(self._waiting) and self._serving < self._limit

    @property
    def others_wait(self) -> bool:
        """Whether a connection waits while this thread serves another."""
        return bool(self._waiting)
