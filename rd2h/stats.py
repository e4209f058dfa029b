"""Counters of the data path, cheap enough to keep on the hot path.

Values only ever grow between two ``take`` calls; ``take`` hands out what has gathered and starts afresh, which is what
vLLM's connector statistics want. Every name is listed with its meaning in ``FIELDS``; failures are counted by kind.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from rd2h.children import FailureKind

FIELDS: Mapping[str, str] = {
    "layers_published": "ready messages sent by Prefill",
    "acks": "acknowledgements received by Prefill",
    "ack_seconds": "time from sending a ready message to its acknowledgement, summed over acks",
    "acks_ignored": "acknowledgements that belonged to nothing (stale, duplicate, foreign)",
    "gate_waits": "times that Prefill's forward had to wait for a storage gate",
    "gate_wait_seconds": "time that Prefill's forward waited for storage gates",
    "endpoints_lost": "Decode endpoints that Prefill gave up",
    "layers_read": "layers read by Decode",
    "bytes_read": "bytes pulled by Decode",
    "read_seconds": "time spent in engine reads, summed over reads",
    "read_errors": "engine reads that failed",
    "reads_expired": "engine reads whose bytes were not used because the read lease had run out",
    "requests_refused": "requests of a ready message that were refused one by one",
    "messages_refused": "ready messages that were refused as a whole",
    "messages_parked": "ready messages that waited for their destination",
    "frames_malformed": "frames dropped because they were malformed",
    "prompt_tokens_computed": "prompt tokens that Decode computed itself: one for each request whose KV was pulled",
    "children_done": "children that received all their KV",
    "children_failed": "children that ended failed, by reason",
    "children_aborted": "children that were aborted while waiting for KV",
    "offload_hits": "selected tokens of sparse offload that were in the hot buffer",
    "offload_misses": "selected tokens of sparse offload that were copied from the host pool, counted once a selection",
    "offload_evictions": "tokens of sparse offload that made room in the hot buffer",
    "offload_resyncs": "times that a layer sharing a selection had skipped a step and copied the whole selection",
    "offload_rows_appended": "new token rows written to the host pool, summed over layers",
    "offload_h2d_bytes": "bytes copied from the host pool to hot buffers",
    "offload_h2d_seconds": "time of these copies",
    "offload_d2h_bytes": "bytes of new token rows written to the host pool",
    "offload_d2h_seconds": "time of these writes",
}


FAILURES = "children_failed"


def failures_of(kind: FailureKind) -> str:
    """Name under which failures of one kind are counted."""
    return f"{FAILURES}/{kind.value}"


@dataclass(slots=True)
class TransferStats:
    """Thread-safe counters by the names of ``FIELDS`` and of ``failures_of``."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _values: dict[str, float] = field(default_factory=dict)

    def add(self, **amounts: float) -> None:
        """Add to several counters at once."""
        with self._lock:
            values = self._values
            for name, amount in amounts.items():
                values[name] = values.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What has gathered since the last call."""
        with self._lock:
            values, self._values = self._values, {}
        return values
