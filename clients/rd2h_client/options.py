"""Options of the clients: frozen, so that they can be shared and cannot change under a connection."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TlsOptions:
    """TLS towards the meta service. Plain text is used without it."""

    ca_path: str | None = None
    """PEM file with the authorities of the server's certificate; None takes gRPC's own list."""
    cert_path: str | None = None
    """PEM file with the client's certificate chain, for mutual TLS; needs key_path."""
    key_path: str | None = None
    """PEM file with the client's private key."""
    server_name_override: str | None = None
    """Name to expect in the server's certificate instead of the host of the target."""


@dataclass(frozen=True)
class KeepAliveOptions:
    """HTTP/2 pings that find a dead connection."""

    interval_s: float = 20.0
    """Time between pings."""
    timeout_s: float = 10.0
    """Time after which an unanswered ping ends the connection."""


@dataclass(frozen=True)
class RetryOptions:
    """Retry of calls that the service did not refuse for good. All operations are idempotent."""

    max_attempts: int = 5
    """Attempts of a unary call, the first included; gRPC allows at most 5."""
    initial_backoff_s: float = 0.05
    """Delay before the first retry or reconnect; doubled each time, with jitter."""
    max_backoff_s: float = 1.0
    """Longest delay."""

    def delay_s(self, failures: int) -> float:
        """Return the delay after so many failures in a row: doubled each time, with jitter against trying in step."""
        ceiling_s = min(self.max_backoff_s, self.initial_backoff_s * float(2 ** min(failures, 20)))
        return ceiling_s * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class ClientOptions:
    """Everything about a client beside the address."""

    tls: TlsOptions | None = None
    """TLS; also switched on by a grpcs:// target."""
    token: str | None = field(default=None, repr=False)
    """Bearer token; sent over TLS, and in plain text only to a loopback address unless allow_plain_token."""
    keepalive: KeepAliveOptions = KeepAliveOptions()
    """See KeepAliveOptions."""
    retry: RetryOptions = RetryOptions()
    """See RetryOptions."""
    deadline_s: float = 10.0
    """Longest time of one operation, retries and reconnects included."""
    connect_deadline_s: float = 10.0
    """Longest time that start() waits for the service."""
    allow_plain_token: bool = False
    """Send the token in plain text to other machines."""
    advert_ttl_s: float = 600.0
    """Life of an advert that names none."""
    max_open: int = 100_000
    """Operations, awaits and adverts kept at a time, each; more raise QueueFullError."""
