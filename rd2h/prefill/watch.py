"""Which sockets the publisher's thread waits on: their edge-triggered descriptors, and a way to wake it."""

import select
from collections.abc import Sequence

from rd2h.prefill.link import Link
from rd2h.wakeup import Wakeup


class LinkWatch:
    """Descriptors of all links. ``wait`` needs no lock; everything else runs under the publisher's."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup.fd, select.EPOLLIN)
        self._by_fd: dict[int, Link] = {}
        self._unattended: set[Link] = set()

    def wait(self, timeout_s: float | None) -> Sequence[int]:
        """Descriptors with events; returns early after ``wake``."""
        return [fd for fd, _ in self._epoll.poll(timeout_s)]

    def wake(self) -> None:
        """Make ``wait`` return. Any thread."""
        self._wakeup.set()

    def touched(self, fds: Sequence[int]) -> tuple[set[Link], bool]:
        """Links with something to receive, and whether somebody called ``wake``."""
        links = {link for fd in fds if (link := self._by_fd.get(fd)) is not None}
        woken = self._wakeup.fd in fds
        if woken:
            self._wakeup.clear()
            links |= self._unattended
            self._unattended.clear()
        return links, woken

    def leave_unattended(self, link: Link) -> None:
        """The calling thread swallowed an edge of this link: the waiting thread must look at it."""
        self._unattended.add(link)
        self._wakeup.set()

    def add(self, link: Link) -> None:
        """Watch a new link."""
        for fd in link.fds:
            self._by_fd[fd] = link
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def remove(self, link: Link) -> None:
        """Forget a link, before it is closed."""
        for fd in link.fds:
            del self._by_fd[fd]
            self._epoll.unregister(fd)
        self._unattended.discard(link)

    def close(self) -> None:
        """Release the descriptors."""
        self._epoll.close()
        self._wakeup.close()
