"""Limits and modes that requests obey; plain values, so that the command line can be checked without a network."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RecomputeMode(Enum):
    """Whether requests that Decode gives back are continued; the values of `--recompute`."""

    AUTO = "auto"
    """For Decode engines that may be of the kind that gives requests back."""
    ON = "on"
    OFF = "off"
    """Streams are passed through byte for byte; a request that is given back ends with an error."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Time limits of one attempt."""

    rendezvous_s: float = 120.0
    """Decode must have advertised its first child, or answered, by then."""
    prefill_s: float = 600.0
    """A wave must be computed by then."""
    prefill_queue_s: float = 120.0
    """A wave waits at most this long for a Prefill engine with room."""
    no_prefill_s: float = 6.0
    """A wave waits at most this long while no Prefill engine is usable at all, whatever their room."""
    ttl_s: float = 900.0
    """How long the meta service keeps the rendezvous."""
    gather_window_s: float = 0.2
    """Silence after which the children that are there go to Prefill without the rest."""
    child_failed_grace_s: float = 5.0
    """Decode must have ended a request this long after it or Prefill said that a child failed."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of a request as a whole."""

    max_children: int = 1024
    """Most prompts x n."""
    retries: int = 1
    """Further attempts on other engines, while nothing was sent and the failure is safe to retry."""
    queue_s: float = 30.0
    """Longest wait for an engine with room."""
    no_engine_s: float = 8.0
    """Longest wait when no engine is usable at all."""
    recompute: RecomputeMode = RecomputeMode.AUTO
    """Whether requests that Decode gives back are continued."""
