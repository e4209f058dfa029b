"""Settings of a Decode rank's puller."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullerOptions:
    """Times in seconds; see ``rd2h.decode.puller`` for what each bounds."""

    bind_host: str
    port: int
    generation: int
    fingerprint: bytes
    tp_size: int
    peer_timeout_s: float = 20.0
    park_timeout_s: float = 5.0
    idle_timeout_s: float = 120.0
    hold_s: float = 5.0
    read_threads: int = 4
    max_connections: int = 4096
    require_registered: bool = True
    """Read only from Prefill generations that ``Puller.trust`` named."""
    legacy_hosts: frozenset[str] = frozenset()
    """Addresses of Prefills that may speak only the legacy messages."""
    cpus: frozenset[int] = frozenset()
    """Processors of the serving threads and their I/O thread; empty: any."""

    @property
    def ping_interval_s(self) -> float:
        """Heartbeats come often enough that two may be lost within a read lease."""
        return self.peer_timeout_s / 8
