"""What a run of one system at one concurrency gave."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Samples:
    """Latencies of finished rendezvous, and how long all of them took together."""

    latencies_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Rendezvous a second."""
        return len(self.latencies_s) / self.elapsed_s

    def percentile_us(self, share: float) -> float:
        """The latency that `share` of the rendezvous stay within, in microseconds."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e6
