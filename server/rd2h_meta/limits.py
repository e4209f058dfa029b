"""Limits of the meta service. Every table, queue and wait of the service is bounded by one of these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegistryLimits:
    """Bounds of the engine registry."""

    max_engines: int = 10_000
    """Engines with a live lease."""
    default_ttl_s: float = 15.0
    """Lease time when the engine wishes none."""
    min_ttl_s: float = 1.0
    """Shortest lease time granted."""
    max_ttl_s: float = 120.0
    """Longest lease time granted."""
    history_events: int = 4_096
    """Changes kept for watchers that resume."""
    watcher_queue_events: int = 8_192
    """Changes queued for one watcher before it is told to list again."""
    max_watchers: int = 4_096
    """Watches open at a time."""
    max_health_watches: int = 1_024
    """Health watches open at a time."""
    removed_memory: int = 10_000
    """Removed engines remembered (their health is NOT_SERVING instead of unknown), and replaced generations."""
    max_layers: int = 1_024
    """Layers in a layout."""
    grace_s: float = 10.0
    """Time after start in which absent engines are taken for not yet returned."""
    retry_after_s: float = 1.0
    """Delay told to a caller who meets a limit."""


@dataclass(frozen=True)
class RendezvousLimits:
    """Bounds of the rendezvous table."""

    max_open: int = 100_000
    """Rendezvous open at a time."""
    max_children: int = 4_096
    """Children of one rendezvous."""
    max_live_children: int = 200_000
    """Children advertised and not ended, over all rendezvous."""
    default_ttl_s: float = 600.0
    """Life of a rendezvous or child when the caller wishes none."""
    min_ttl_s: float = 0.1
    """Shortest life granted."""
    max_ttl_s: float = 7_200.0
    """Longest life granted."""
    memory_s: float = 300.0
    """How long an ended rendezvous is remembered for late joiners."""
    max_remembered: int = 20_000
    """Ended rendezvous remembered of either kind (done, and all others); the oldest are forgotten first."""
    max_remembered_children: int = 100_000
    """Children of ended rendezvous remembered of either kind."""
    max_request_ids: int = 4_096
    """Request ids in one ReportFailure."""
    recent_failures: int = 64
    """Failures shown to operators."""
    retry_after_s: float = 0.5
    """Delay told to a caller who meets a limit."""


@dataclass(frozen=True)
class ServerLimits:
    """All bounds of the service."""

    registry: RegistryLimits = RegistryLimits()
    rendezvous: RendezvousLimits = RendezvousLimits()
    max_streams: int = 4_096
    """Exchange and Await streams open at a time."""
    outbox_entries: int = 65_536
    """Results and events queued for one stream before it is ended."""
    max_message_bytes: int = 4 * 1024 * 1024
    """Largest message accepted, and sent on a stream."""
    max_reply_bytes: int = 64 * 1024 * 1024
    """Largest message sent: the list of all engines."""
    max_concurrent_streams: int = 1_024
    """gRPC calls open on one connection."""
