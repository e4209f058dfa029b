"""Options of the transfer engines: plain frozen data, validated when made."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from urllib.parse import urlsplit

from rd2h.errors import ConfigError


class MemfabricProtocol(enum.Enum):
    """Values of `memfabric_transfer_protocol`; equal on Prefill and Decode."""

    SDMA = "sdma"
    """Default; A3 products."""
    DEVICE_RDMA = "device_rdma"
    """A3 products."""
    DEVICE_URMA = "device_urma"
    """950PR and 950DT products."""

    @classmethod
    def parse(cls, value: object, key: str = "memfabric_transfer_protocol") -> MemfabricProtocol:
        """The protocol named by a configuration value, or ConfigError naming key, value and what is allowed."""
        if isinstance(value, cls):
            return value
        for protocol in cls:
            if protocol.value == value:
                return protocol
        raise ConfigError.bad_value(key, value, [protocol.value for protocol in cls])


LOG_LEVELS = {"debug": 0, "info": 1, "warn": 2, "error": 3}
"""Names of MemFabric's log levels."""


@dataclass(frozen=True, slots=True)
class MemfabricTls:
    """Credentials of MemFabric's config-store connections (its control connections, not the data path)."""

    info: str
    """Certificate settings in MemFabric's own text form ("tlsCaPath: ...; tlsCert: ...;"), passed on as they are."""
    private_key_path: str
    """PEM file of the private key that belongs to the certificate named in `info`."""
    key_password_path: str | None = None
    """File that holds the password of the key, in clear; None for a key without one."""

    def __post_init__(self) -> None:
        if not self.info.strip():
            raise ConfigError.bad_value("memfabric_tls.info", self.info, "MemFabric's certificate settings")
        if not self.private_key_path:
            raise ConfigError.bad_value("memfabric_tls.private_key_path", self.private_key_path, "a file name")


@dataclass(frozen=True, slots=True)
class MemfabricOptions:
    """Options of the `memfabric` engine."""

    hostname: str
    """Address under which peers reach this host; part of the published session. Not a wildcard."""
    device_id: int
    """NPU number inside this process."""
    protocol: MemfabricProtocol = MemfabricProtocol.SDMA
    store_url: str | None = None
    """Config store of this engine; None means `tcp://<hostname>` with a port chosen by MemFabric."""
    tls: MemfabricTls | None = None
    """None leaves the config store without TLS."""
    log_level: str = "warn"
    initialize_timeout_s: float = 120.0
    """Bound of the native start-up, which waits for drivers and stores."""
    read_timeout_ms: int | None = None
    """Bound of one native read (ASCEND_TRANSFER_TIMEOUT); None derives it from the RDMA retry settings of the host."""
    close_timeout_s: float = 60.0
    """How long `close` waits for running reads."""
    max_sessions: int = 4096
    """Bound of the table of validated peer sessions; the least recently used one is forgotten first."""

    def __post_init__(self) -> None:
        host = self.hostname
        if not host or host in ("0.0.0.0", "::", "*") or any(c.isspace() or c in "/[]@" for c in host):
            raise ConfigError.bad_value("hostname", host, "a host name or IP literal that peers can reach, no wildcard")
        if isinstance(self.device_id, bool) or not 0 <= self.device_id < 1024:
            raise ConfigError.bad_value("device_id", self.device_id, "0..1023")
        if not isinstance(self.protocol, MemfabricProtocol):
            # Reached only by untyped callers; the message is the one that the configuration promises.
            object.__setattr__(self, "protocol", MemfabricProtocol.parse(self.protocol))
        if self.store_url is not None and (
            urlsplit(self.store_url).scheme != "tcp" or not urlsplit(self.store_url).hostname
        ):
            raise ConfigError.bad_value("store_url", self.store_url, "tcp://host or tcp://host:port")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError.bad_value("log_level", self.log_level, LOG_LEVELS)
        check_positive("initialize_timeout_s", self.initialize_timeout_s)
        check_positive("close_timeout_s", self.close_timeout_s)
        check_positive("max_sessions", self.max_sessions)
        if self.read_timeout_ms is not None:
            check_positive("read_timeout_ms", self.read_timeout_ms)

    @property
    def effective_store_url(self) -> str:
        """The store URL that goes to MemFabric; IPv6 literals are bracketed."""
        return self.store_url or f"tcp://{bracketed(self.hostname)}"


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of the `host` engine (processes of one host and one user)."""

    max_sessions: int = 1024
    """Bound of the table of validated peer sessions; the least recently used one is forgotten first."""
    close_timeout_s: float = 60.0
    """How long `close` waits for running reads."""

    def __post_init__(self) -> None:
        check_positive("max_sessions", self.max_sessions)
        check_positive("close_timeout_s", self.close_timeout_s)


@dataclass(frozen=True, slots=True)
class NullOptions:
    """Options of the `null` engine: none."""


EngineOptions = HostOptions | MemfabricOptions | NullOptions


def bracketed(host: str) -> str:
    """A host as it stands in a URL or before a port: IPv6 literals in brackets."""
    return f"[{host}]" if ":" in host else host


def check_positive(key: str, value: float) -> None:
    """Raise ConfigError unless `value` is greater than zero."""
    if not value > 0:
        raise ConfigError.bad_value(key, value, "a number greater than 0")
