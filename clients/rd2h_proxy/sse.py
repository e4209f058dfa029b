"""Server-sent events out of a byte stream, however it is cut into chunks."""

from __future__ import annotations

import re

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class SseOverflowError(ValueError):
    """One event is longer than the reader may hold."""


class SseReader:
    """Splits a stream into complete events and keeps the rest, at most `limit_bytes` of it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()
        self._scanned = 0

    @property
    def rest(self) -> bytes:
        """Bytes of the event that is not complete yet."""
        return bytes(self._rest)

    @property
    def holding(self) -> bool:
        """Whether a part of an event is held."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Adds a chunk and returns the events that are complete now, each with its closing blank line.

        Raises:
            SseOverflowError: an event grew beyond the limit.
        """
        self._rest += chunk
        events: list[bytes] = []
        start = 0
        # An end mark may straddle chunks by up to three bytes; earlier bytes were searched before.
        position = max(0, self._scanned - 3)
        while (end := _EVENT_END.search(self._rest, position)) is not None:
            events.append(bytes(self._rest[start : end.end()]))
            start = position = end.end()
        if start:
            del self._rest[:start]
        self._scanned = len(self._rest)
        if len(self._rest) > self._limit_bytes:
            raise SseOverflowError(f"server-sent event of more than {self._limit_bytes} bytes")
        return events


def event_data(event: bytes) -> bytes | None:
    """The data of one event; None for comments and events without data."""
    lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
    if not lines:
        return None
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
