"""Which connections have work, and how many threads serve one now."""

import threading
from collections import deque

from rd2h.decode.connection import Connection

SLOW_S = 0.1
"""A connection whose last read took so long counts as slow."""


class ServiceQueue:
    """Connections that wait to be served, first come first served, by at most ``limit`` threads at a time.

    A connection is in here at most once (it is ``busy`` then), so the queue is as bounded as the connections are. Slow
    ones, however many ranks their Prefills have, leave one thread to the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._slow_limit = limit, max(1, limit - 1)
        self._lock = threading.Lock()
        self._waiting: deque[Connection] = deque()
        self._serving = 0
        self._slow = 0
        """Threads that serve a connection which was slow when they took it."""

    def put(self, connection: Connection) -> None:
        """Add a connection that became busy."""
        with self._lock:
            self._waiting.append(connection)

    def take(self, *, after: bool, slow: bool) -> tuple[Connection | None, bool, bool]:
        """The next connection to serve, whether it counts as slow, and whether another thread is needed too.

        ``after``: the calling thread has just served one, which was ``slow`` when it took it. When it gets None it
        serves nothing any more.
        """
        with self._lock:
            if after:
                self._serving -= 1
                self._slow -= slow
            waiting = self._waiting
            if not waiting or self._serving >= self._limit:
                return None, False, False
            connection = waiting[0]
            slow = connection.read_s >= SLOW_S
            if not slow or self._slow < self._slow_limit:
                waiting.popleft()
            else:
                quick = next((other for other in waiting if other.read_s < SLOW_S), None)
                if quick is None:
                    return None, False, False  # a thread that serves a slow one takes it afterwards
                waiting.remove(quick)
                connection, slow = quick, False
            self._serving += 1
            self._slow += slow
            return connection, slow, bool(waiting) and self._serving < self._limit

    @property
    def others_wait(self) -> bool:
        """Whether a connection waits while this thread serves another."""
        return bool(self._waiting)
