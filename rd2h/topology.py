"""Which Prefill rank feeds which Decode rank, which part of a chunk each one moves, and on which port.

Prefill may be wider than Decode, never narrower, and divisible: ``ratio = p_tp // d_tp`` Prefill ranks form the
contributors of one Decode rank. Contributor 0 of each Decode rank moves main KV; all contributors share the indexer.
"""

from dataclasses import dataclass

from rd2h.errors import TopologyError

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class TpMapping:
    """How ``p_tp`` Prefill ranks map onto ``d_tp`` Decode ranks."""

    p_tp: int
    d_tp: int

    @classmethod
    def of(cls, p_tp: int, d_tp: int) -> "TpMapping":
        """Validate the two sizes; raises TopologyError naming both."""
        for size in (p_tp, d_tp):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise TopologyError(
                    f"tensor-parallel sizes must be whole numbers of at least 1, got {p_tp!r} (Prefill) and "
                    f"{d_tp!r} (Decode)"
                )
        if p_tp < d_tp or p_tp % d_tp:
            raise TopologyError(
                f"Prefill tensor-parallel size {p_tp} must be a multiple of Decode tensor-parallel size {d_tp}"
            )
        return cls(p_tp, d_tp)

    @property
    def ratio(self) -> int:
        """Contributors per Decode rank."""
        return self.p_tp // self.d_tp

    def decode_rank(self, p_rank: int) -> int:
        """Decode rank that Prefill rank ``p_rank`` feeds."""
        return p_rank // self.ratio

    def member(self, p_rank: int) -> int:
        """Contributor index of ``p_rank`` within its Decode rank."""
        return p_rank % self.ratio


def share_of(start: int, num_blocks: int, parts: int, index: int) -> range:
    """Contiguous share ``index`` of ``parts`` of a chunk of ``num_blocks`` blocks that begins at block ``start``.

    The shares of one chunk are disjoint and complete. The first owner rotates with ``start``, so that chunks of a
    block or two do not all land on the same rank. Returns positions within the chunk, 0-based.
    """
    position = (index - start) % parts
    return range(position * num_blocks // parts, (position + 1) * num_blocks // parts)


def base_port(kv_port: int, dp_rank: int, tp_size: int) -> int:
    """First connector port of the Decode engine with *global* data-parallel rank ``dp_rank``.

    Raises TopologyError when any rank's port would leave 1..65535.
    """
    base = kv_port + dp_rank * tp_size
    last = base + tp_size - 1
    if base < 1 or last > MAX_PORT:
        raise TopologyError(
            f"kv_port {kv_port} with data-parallel rank {dp_rank} and tensor-parallel size {tp_size} needs ports "
            f"{base}..{last}; allowed are 1..{MAX_PORT}"
        )
    return base


def rank_port(base: int, d_rank: int) -> int:
    """Port of Decode rank ``d_rank``; raises TopologyError when it leaves 1..65535."""
    port = base + d_rank
    if not 1 <= port <= MAX_PORT:
        raise TopologyError(f"remote port {base} + Decode rank {d_rank} = {port} is outside 1..{MAX_PORT}")
    return port
