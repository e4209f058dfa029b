"""Wake a thread that waits in ``poll`` from any other thread."""

import os


class Wakeup:
    """An eventfd: ``set`` any number of times, then one ``clear`` by the waiting thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Make ``fd`` readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make ``fd`` quiet again."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self.fd)
