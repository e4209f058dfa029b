"""What requests hold of something that is bounded over all of them: 503 beyond the bound, and given back at the end."""

from __future__ import annotations

from contextlib import ExitStack

from aiohttp import web

from rd2h_proxy.errors import UnavailableError

AT_END = web.RequestKey("at_end", ExitStack)
"""Of every request: closed when its answer is written or its client has gone away."""


class Bound:
    """So much of something may be held at a time. There is no queue: whoever comes too late comes again."""

    def __init__(self, limit: int, what: str) -> None:
        """`what`: for the error message, after the limit."""
        self.limit = limit
        self._what = what
        self.used = 0

    def holding(self, http: web.Request) -> Holding:
        """Nothing yet, for one request; given back when that ends."""
        holding = Holding(self)
        http[AT_END].callback(holding.release)
        return holding

    def take(self, amount: int) -> None:
        """Takes some more.

        Raises:
            UnavailableError: it is not there.
        """
        if self.used + amount > self.limit:
            raise UnavailableError(f"{self.limit} {self._what}; no more are taken at the moment")
        self.used += amount


class Holding:
    """One request's part."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._amount = 0

    def add(self, amount: int) -> None:
        """Holds so much more.

        Raises:
            UnavailableError: it is not there.
        """
        self._bound.take(amount)
        self._amount += amount

    def release(self) -> None:
        """Gives everything back."""
        self._bound.used -= self._amount
        self._amount = 0
