"""What every attempt at a request uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from rd2h_proxy.background import Background
from rd2h_proxy.membership import Membership
from rd2h_proxy.meta_link import MetaLink
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.token_ratio import TokenRatio


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Time limits of one attempt."""

    rendezvous_s: float = 120.0
    """Decode must have advertised its first child, or answered, by then."""
    prefill_s: float = 600.0
    """A wave must be computed by then."""
    prefill_queue_s: float = 30.0
    """A wave waits at most this long for a Prefill engine with room."""
    ttl_s: float = 900.0
    """How long the meta service keeps the rendezvous."""
    gather_window_s: float = 0.2
    """Silence after which the children that are there go to Prefill without the rest."""
    child_failed_grace_s: float = 5.0
    """Decode must have ended a request this long after it or Prefill said that a child failed."""


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
    ratio: TokenRatio = field(default_factory=TokenRatio)
