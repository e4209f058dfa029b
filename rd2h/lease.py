"""Read lease of one Prefill connection on Decode: is what was just read still what Prefill published?

Decode sends its own clock in a ping, Prefill echoes it, and the lease runs from the moment the *ping was sent*.
Prefill gives a Decode up only after ``peer_timeout`` without hearing from it, and it heard the ping no earlier than
it was sent. So while less than half of ``peer_timeout`` has passed since that sending, Prefill cannot have reused the
bytes. Echoes that waited in a socket while Decode was stopped prolong nothing, because they carry the old sending
time. The clock must count suspension (CLOCK_BOOTTIME).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ReadLease:
    """Lease over one connection; times in nanoseconds of Decode's suspension-counting clock."""

    duration_ns: int
    start_ns: int | None = None

    @classmethod
    def of(cls, peer_timeout_s: float) -> "ReadLease":
        """A lease of half of ``peer_timeout_s``."""
        return cls(int(peer_timeout_s * 1e9 / 2))

    def echoed(self, sent_ns: int, now_ns: int) -> None:
        """Prefill echoed a ping that Decode sent at ``sent_ns``; a time in the future is ignored."""
        if sent_ns <= now_ns and (self.start_ns is None or sent_ns > self.start_ns):
            self.start_ns = sent_ns

    def valid(self, now_ns: int) -> bool:
        """Whether bytes that were read before ``now_ns`` may be used."""
        return self.start_ns is not None and now_ns - self.start_ns < self.duration_ns
