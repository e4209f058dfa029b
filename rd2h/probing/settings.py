"""Settings of one probe, from the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rd2h.engines import EngineOptions, HostOptions, MemfabricOptions, MemfabricProtocol
from rd2h.errors import ConfigError
from rd2h.topology import MAX_PORT

MIB = 1 << 20
MAX_TIMEOUT_S = 86_400
PROBE_BACKENDS = ("host", "memfabric")


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What both sides of a probe need to know. Raises ConfigError for values that make no sense."""

    backend: str
    endpoint: str
    """host:port; where Prefill listens and Decode connects. IPv6 literals bracketed."""
    size_bytes: int
    """Prefill: size of the buffer. Decode: the largest buffer that it reads."""
    block_bytes: int
    iterations: int
    timeout_s: float
    """Bound of every wait for the other side, and of native start-up."""
    memory: str
    device_id: int
    protocol: MemfabricProtocol
    hostname: str
    store_url: str | None
    seed: int

    def __post_init__(self) -> None:
        if self.backend not in PROBE_BACKENDS:
            raise ConfigError.bad_value("--backend", self.backend, PROBE_BACKENDS)
        if not 1 <= self.block_bytes <= self.size_bytes:
            raise ConfigError.bad_value("--block-kib", self.block_bytes / 1024, f"up to {self.size_bytes / 1024:g}")
        if not 1 <= self.iterations <= 10_000:
            raise ConfigError.bad_value("--iterations", self.iterations, "1..10000")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError.bad_value("--timeout-s", self.timeout_s, f"seconds above 0 and up to {MAX_TIMEOUT_S}")
        if self.memory == "npu" and self.backend == "host":
            raise ConfigError.bad_value("--memory", self.memory, "cpu for the host engine")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError.bad_value("--seed", self.seed, "0..2^63-1")

    @property
    def ipv6(self) -> int:
        """1 when the endpoint is an IPv6 literal; ZMQ would otherwise show IPv4 ones in IPv6 clothes."""
        return int(self.endpoint.startswith("["))

    @property
    def engine_options(self) -> EngineOptions:
        """Options for `create_engine(backend, ...)`."""
        if self.backend == "host":
            return HostOptions()
        return MemfabricOptions(
            hostname=self.hostname,
            device_id=self.device_id,
            protocol=self.protocol,
            store_url=self.store_url,
            initialize_timeout_s=self.timeout_s,
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> ProbeSettings:
        """Settings of parsed arguments."""
        is_prefill = args.role == "prefill"
        size_bytes = _bytes("--size-mib" if is_prefill else "--max-mib", args.size_mib, MIB)
        return cls(
            backend=args.backend,
            endpoint=_endpoint("--listen", args.listen) if is_prefill else _endpoint("--connect", args.connect),
            size_bytes=size_bytes,
            block_bytes=min(_bytes("--block-kib", args.block_kib, 1024), size_bytes),
            iterations=args.iterations,
            timeout_s=args.timeout_s,
            memory=args.memory or ("npu" if args.backend == "memfabric" else "cpu"),
            device_id=args.device_id,
            protocol=MemfabricProtocol.parse(args.protocol, "--protocol"),
            hostname=args.hostname,
            store_url=args.store_url,
            seed=args.seed,
        )


def _endpoint(key: str, text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError.bad_value(key, text, "host:port, IPv6 literals in brackets")
    return text


def _bytes(key: str, value: float, unit: int) -> int:
    if not 1 <= value * unit <= 1 << 40:  # nor is nan
        raise ConfigError.bad_value(key, value, f"a size from 1 byte to {(1 << 40) / unit:g}")
    return int(value * unit)
