"""What every attempt at a request uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from rd2h_proxy.background import Background
from rd2h_proxy.bound import Bound
from rd2h_proxy.drain import Drain
from rd2h_proxy.limits import AttemptLimits
from rd2h_proxy.membership import Membership
from rd2h_proxy.meta_link import MetaLink
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.target import pair_conflict
from rd2h_proxy.token_ratio import TokenRatio


@dataclass(frozen=True, slots=True)
class Router:
    """What every attempt uses."""

    session: aiohttp.ClientSession
    prefill: EnginePool
    decode: EnginePool
    membership: Membership
    meta: MetaLink
    metaserver: str
    """Address of the meta service as Decode knows it."""
    limits: AttemptLimits
    background: Background
    bodies: Bound
    """Bytes of the clients' bodies."""
    passing: Bound
    """Requests that are passed to an engine as they are."""
    drain: Drain = field(default_factory=Drain)
    ratio: TokenRatio = field(default_factory=TokenRatio)

    @property
    def serving(self) -> bool:
        """Whether a request would be served now, as far as can be known before it comes."""
        decodes, prefills = self.decode.usable(), self.prefill.usable()
        return self.meta.connected and any(
            pair_conflict(prefill, decode) is None for decode in decodes for prefill in prefills
        )
