"""The connector's configuration: ``kv_connector_extra_config`` and the environment, checked at start-up.

Every error is one line that names the key, the value and what is allowed.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rd2h.engines import MemfabricProtocol
from rd2h.errors import ConfigError

TRANSFER_BACKENDS = ("memfabric", "host")
MAX_TEXT = 1024
MAX_CPU = 65536


def _boolean(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError.bad_value(key, value, "true or false")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise ConfigError.bad_value(key, value, f"a string of 1..{MAX_TEXT} characters")
    return value


def _secret(key: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise ConfigError(f"{key} is not allowed; expected a string of 1..{MAX_TEXT} printable characters", key=key)
    return value


def _file(key: str, value: object) -> str:
    text = _text(key, value)
    if not Path(text).is_file() or not os.access(text, os.R_OK):
        raise ConfigError.bad_value(key, value, "a readable file")
    return text


def _positive(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError.bad_value(key, value, "a positive number of seconds")
    return float(value)


def _non_negative(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError.bad_value(key, value, "a number of seconds, 0 or more")
    return float(value)


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise ConfigError.bad_value(key, value, "a whole number of 1..65536")
    return value


def _backend(key: str, value: object) -> str:
    if value not in TRANSFER_BACKENDS:
        raise ConfigError.bad_value(key, value, TRANSFER_BACKENDS)
    return str(value)


def _protocol(key: str, value: object) -> str:
    return MemfabricProtocol.parse(value, key).value


def _meta_service(key: str, value: object) -> str:
    from rd2h_client.addresses import AddressError, parse_target

    text, allowed = _text(key, value), "grpc://host:port or grpcs://host:port"
    if not text.startswith(("grpc://", "grpcs://")):
        raise ConfigError.bad_value(key, value, allowed)
    try:
        return parse_target(text).url
    except AddressError as error:
        raise ConfigError.bad_value(key, value, f"{allowed} ({error.__cause__})") from None


def advertised_host(key: str, value: object) -> str:
    """A host that peers can connect to, without brackets. Raises ConfigError naming ``key``."""
    from rd2h_client.addresses import AddressError, check_advertised_host

    host = _text(key, value).removeprefix("[").removesuffix("]")
    try:
        check_advertised_host(host)
    except AddressError as error:
        raise ConfigError.bad_value(key, value, str(error)) from None
    return host


def _bind_host(key: str, value: object) -> str:
    """As ``advertised_host``, but wildcards may be listened on."""
    text = _text(key, value).removeprefix("[").removesuffix("]")
    wildcards = {"*": "0.0.0.0", "0.0.0.0": "0.0.0.0", "::": "::"}
    return wildcards.get(text) or advertised_host(key, text)


def _store_url(key: str, value: object) -> str:
    url = urlsplit(_text(key, value))
    if url.scheme != "tcp" or not url.hostname or url.path or url.query:
        raise ConfigError.bad_value(key, value, "tcp://host or tcp://host:port")
    return str(value)


def _http_address(key: str, value: object) -> str:
    from rd2h_client.addresses import AddressError, check_advertised_host, join_host_port, split_host_port

    try:
        host, port = split_host_port(_text(key, value))
        check_advertised_host(host)
    except AddressError as error:
        raise ConfigError.bad_value(key, value, f"host:port, reachable ({error})") from None
    return join_host_port(host, port)


def _hosts(key: str, value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(host, str) and host for host in value):
        raise ConfigError.bad_value(key, value, "a list of host addresses")
    return frozenset(value)


def _cpus(key: str, value: object) -> tuple[frozenset[int], ...]:
    """One set for all ranks, or one a rank."""
    allowed = "a list of processor numbers, or a list with such a list for every rank"
    if not isinstance(value, list) or not value:
        raise ConfigError.bad_value(key, value, allowed)
    sets = value if all(isinstance(entry, list) and entry for entry in value) else [value]
    for cpu in (cpu for cpus in sets for cpu in cpus):
        if isinstance(cpu, bool) or not isinstance(cpu, int) or not 0 <= cpu < MAX_CPU:
            raise ConfigError.bad_value(key, value, allowed)
    return tuple(frozenset(cpus) for cpus in sets)


def _key(check: Callable[[str, object], Any], default: Any = None, env: str | None = None) -> Any:
    return field(default=default, metadata={"check": check, "env": env})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Settings of one engine. Times in seconds."""

    transfer_backend: str = _key(_backend)
    """"memfabric" on Ascend, "host" between processes of one machine. Required, equal on Prefill and Decode."""
    memfabric_transfer_protocol: str = _key(_protocol, "sdma")
    """"sdma" (default) or "device_rdma" on A3, "device_urma" on 950PR/950DT; equal on Prefill and Decode."""
    memfabric_store_url: str | None = _key(_store_url)
    """Config store of MemFabric; by default tcp://<advertise_host>."""
    use_layerwise: bool = _key(_boolean, True)
    """Accepted for compatibility: transfer is always layer by layer."""
    meta_service: str | None = _key(_meta_service, None, "RD2H_META_SERVICE")
    """grpc://host:port of the meta service; the only one this engine ever contacts."""
    meta_token: str | None = _key(_secret, None, "RD2H_META_TOKEN")
    """Bearer token for the meta service."""
    meta_ca: str | None = _key(_file, None, "RD2H_META_CA")
    """PEM file of the authority that signed the meta service's certificate."""
    meta_cert: str | None = _key(_file, None, "RD2H_META_CERT")
    """PEM file of this engine's certificate, for mutual TLS."""
    meta_key: str | None = _key(_file, None, "RD2H_META_KEY")
    """PEM file of this engine's private key, for mutual TLS."""
    advertise_host: str | None = _key(advertised_host, None, "RD2H_ADVERTISE_HOST")
    """Address under which peers reach this engine; by default vLLM's host address."""
    bind_host: str | None = _key(_bind_host)
    """Decode: address to listen on; by default the advertised one."""
    http_address: str | None = _key(_http_address, None, "RD2H_HTTP_ADDRESS")
    """host:port of this engine's OpenAI server, told to the meta service."""
    prefill_tp_size: int | None = _key(_count)
    """Tensor-parallel size of the Prefill engines, to check the pairing at start-up instead of at the first request."""
    decode_tp_size: int | None = _key(_count)
    """Tensor-parallel size of the Decode engines, as ``prefill_tp_size``."""
    peer_timeout_s: float = _key(_positive, 20.0)
    """After this long without a sign of life a peer is given up; equal on Prefill and Decode."""
    connect_timeout_s: float = _key(_positive, 5.0)
    """Prefill: bound of one connect."""
    handshake_timeout_s: float = _key(_positive, 10.0)
    """Prefill: bound of the metadata exchange."""
    park_timeout_s: float = _key(_positive, 5.0)
    """Decode: how long a layer waits for a destination that is not known yet."""
    idle_timeout_s: float = _key(_positive, 300.0)
    """Decode: a request without any KV for this long fails."""
    hold_s: float = _key(_non_negative, 5.0)
    """Decode: how long blocks are kept after a failed read, while bytes may still land."""
    read_threads: int = _key(_count, 4)
    """Decode: reads that may run side by side."""
    max_connections: int = _key(_count, 4096)
    """Decode: Prefill ranks that may be connected."""
    require_registered_prefill: bool = _key(_boolean, True)
    """Decode: read only from Prefill engines that the meta service knows."""
    legacy_prefill_hosts: frozenset[str] = _key(_hosts, frozenset())
    """Decode: addresses from which Prefills without our extensions are accepted."""
    legacy_decode_hosts: frozenset[str] = _key(_hosts, frozenset())
    """Prefill: addresses of Decodes without our extensions that may be published to."""
    legacy_ack_timeout_s: float = _key(_positive, 300.0)
    """Prefill: a legacy Decode that leaves a ready message unanswered for this long is given up."""
    require_registered_decode: bool = _key(_boolean, True)
    """Prefill: connect only to Decode engines that the meta service knows, never just because a request says so."""
    registration_wait_s: float = _key(_non_negative, 2.0)
    """Prefill: how long a request waits for its Decode to appear in the registry before it is refused."""
    data_path_cpus: tuple[frozenset[int], ...] = _key(_cpus, ())
    """Processors for the connector's own threads, e.g. [8] for every rank, or [[8], [9]] for two ranks; by default any.
    One that nothing else keeps busy makes control messages cheaper by a third."""
    debug_suppress_reads: bool = _key(_boolean, False)
    """Decode: acknowledge without reading. For tests only: the output is garbage."""

    @classmethod
    def parse(cls, extra: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> "ConnectorConfig":
        """Settings from vLLM's extra config; the environment supplies what it leaves out. Raises ConfigError."""
        known = {entry.name: entry for entry in fields(cls)}
        for key, value in extra.items():
            if key not in known:
                raise ConfigError.bad_value(f"kv_connector_extra_config.{key}", value, f"known keys {sorted(known)}")
        if extra.get("transfer_backend") is None:
            raise ConfigError.bad_value("transfer_backend", None, TRANSFER_BACKENDS)
        values: dict[str, Any] = {}
        for name, entry in known.items():
            raw, shown, variable = extra.get(name), name, entry.metadata["env"]
            if raw is None and variable:
                raw, shown = environment.get(variable) or None, f"{name} (from {variable})"
            if raw is not None:
                values[name] = entry.metadata["check"](shown, raw)
        config = cls(**values)
        if (config.meta_cert is None) != (config.meta_key is None):
            raise ConfigError("meta_cert and meta_key must be given together", key="meta_cert")
        return config

    def cpus_of(self, rank: int) -> frozenset[int]:
        """Processors for the threads of one rank; empty for any."""
        sets = self.data_path_cpus
        return sets[rank % len(sets)] if sets else frozenset()
