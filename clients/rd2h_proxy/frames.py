"""Letting go of what a caught exception remembers of the code that raised it."""

from __future__ import annotations


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an exception that is understood, and of those it came from.

    Their frames hold the tasks that hold the exception, a circle, and with it the client's request: megabytes, when it
    has pictures, until the next full garbage collection, which may be thousands of requests away.
    """
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = None
        pending += [other for other in (link.__cause__, link.__context__) if other is not None]
