"""What sparse offload counts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from rd2h.offload.residency import Plan


@dataclass(slots=True)
class OffloadCounters:
    """Only ever grow. H2D is pool to hot buffer, D2H new rows to the pool; bytes of K and V together."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    resyncs: int = 0
    rows_appended: int = 0
    h2d_bytes: int = 0
    h2d_seconds: float = 0.0
    d2h_bytes: int = 0
    d2h_seconds: float = 0.0

    def note_plan(self, plan: Plan) -> None:
        """A selection was looked up."""
        self.hits += plan.hits
        self.misses += plan.misses
        self.evictions += plan.evictions

    def note_fetch(self, num_bytes: int, seconds: float) -> None:
        """Misses were copied."""
        self.h2d_bytes += num_bytes
        self.h2d_seconds += seconds

    def note_append(self, rows: int, num_bytes: int, seconds: float) -> None:
        """New rows were written."""
        self.rows_appended += rows
        self.d2h_bytes += num_bytes
        self.d2h_seconds += seconds

    def copy(self) -> "OffloadCounters":
        """As they are now."""
        return replace(self)

    def values(self) -> dict[str, float]:
        """By name."""
        return asdict(self)

    def since(self, before: "OffloadCounters") -> Mapping[str, float]:
        """What has grown since ``before``, under the connector's names (``offload_...``)."""
        now, then = self.values(), before.values()
        return {f"offload_{name}": now[name] - then[name] for name in now if now[name] > then[name]}
