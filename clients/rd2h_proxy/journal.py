"""Requests in flight and the last finished ones, for operators, metrics and the access log."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rd2h_proxy.phase import Life, Phase

access_log = logging.getLogger("rd2h_proxy.access")

# Reasons quote engines; the last finished records are kept.
_MAX_REASON_CHARACTERS = 1000


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What operators see of one request."""

    request_id: str
    path: str
    life: Life
    children: int = 0
    decode: str = ""
    """host:port of the Decode engine of the last attempt."""
    prefill: str = ""
    """host:port of the Prefill engine of the last wave."""
    attempts: int = 0
    continuations: int = 0
    """How often Decode gave the request back and it was continued."""
    status: int = 0
    """HTTP status the client got; 0 when it got none."""
    reason: str = ""
    first_byte_s: float | None = None
    """Time from arrival to the first byte for the client."""

    def enter(self, phase: Phase) -> None:
        """The request enters a phase now."""
        self.life.move(phase, time.monotonic())


@dataclass(slots=True)
class Journal:
    """Owner of all records. Keeps `recent.maxlen` finished ones."""

    on_finish: Callable[[RequestRecord], None] | None = None
    in_flight: dict[int, RequestRecord] = field(default_factory=dict)
    recent: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=100))
    outcomes: Counter[Phase] = field(default_factory=Counter)

    def begin(self, request_id: str, path: str) -> RequestRecord:
        """A request arrived."""
        record = RequestRecord(request_id, path, Life(Phase.QUEUED, time.monotonic()))
        self.in_flight[id(record)] = record
        return record

    def finish(self, record: RequestRecord, phase: Phase, status: int, reason: str = "") -> None:
        """A request ended in a final phase."""
        record.life.move(phase, time.monotonic())
        reason = reason[:_MAX_REASON_CHARACTERS]
        record.status, record.reason = status, reason
        self.in_flight.pop(id(record), None)
        self.recent.appendleft(record)
        self.outcomes[phase] += 1
        access_log.info(
            "%s %s outcome=%s status=%d attempts=%d decode=%s total_ms=%.0f first_byte_ms=%s%s",
            record.request_id,
            record.path,
            phase.value,
            status,
            record.attempts,
            record.decode or "-",
            (record.life.since - record.life.began) * 1000,
            "-" if record.first_byte_s is None else f"{record.first_byte_s * 1000:.0f}",
            f" reason={reason!r}" if reason else "",
        )
        if self.on_finish is not None:
            self.on_finish(record)
