"""Clients that stop reading: their answers hold engines and memory, so after a while they are given up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Writing:
    """What is being written to one client."""

    transport: asyncio.Transport
    since: float | None = None
    """When the write that is going on began; None between writes."""


class StallGuard:
    """Cuts connections on which one write has not finished for `limit_s`. One sweep serves all streams."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._streams: set[Writing] = set()

    @contextmanager
    def watch(self, transport: asyncio.Transport) -> Iterator[Writing]:
        """Watches a connection; the caller sets `since` around its writes."""
        stream = Writing(transport)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.limit_s / 4))
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """One sweep."""
        for stream in list(self._streams):
            if stream.since is not None and now - stream.since > self.limit_s:
                log.warning("client %s does not read; cut", stream.transport.get_extra_info("peername"))
                # The write that waits gets a connection error, like that of a client that went away.
                stream.transport.abort()
                self._streams.discard(stream)
