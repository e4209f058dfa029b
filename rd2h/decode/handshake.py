"""Whether a Prefill that introduces itself may be read from, and which part it contributes."""

from rd2h.decode.options import PullerOptions
from rd2h.errors import LayoutError, RequestError, TopologyError
from rd2h.topology import TpMapping
from rd2h.wire import PeerInfo


def contributor_of(peer: PeerInfo | None, address: str, options: PullerOptions, d_rank: int) -> tuple[int, int] | None:
    """(member, ratio) that follow from an extended peer's rank, None for a legacy peer.

    Raises RequestError, TopologyError or LayoutError for a peer that does not fit this Decode rank.
    """
    if peer is None:
        if address not in options.legacy_hosts:
            raise RequestError("legacy Prefills are not accepted from this host (see legacy_prefill_hosts)")
        return None
    if peer.version < 1:
        raise RequestError(f"wire version {peer.version} is not supported")
    mapping = TpMapping.of(peer.tp_size, options.tp_size)
    if (wanted := mapping.decode_rank(peer.tp_rank)) != d_rank:
        raise TopologyError(f"Prefill rank {peer.tp_rank} belongs to Decode rank {wanted}")
    own_ms = round(options.peer_timeout_s * 1000)
    if 0 < peer.peer_timeout_ms < own_ms:
        # It would reuse memory while the read lease of this side still runs.
        raise RequestError(f"peer_timeout_s is {peer.peer_timeout_ms / 1000:g} on Prefill, {own_ms / 1000:g} on Decode")
    if options.fingerprint and peer.fingerprint != options.fingerprint:
        raise LayoutError("layout fingerprint differs between Prefill and Decode")
    return mapping.member(peer.tp_rank), mapping.ratio
