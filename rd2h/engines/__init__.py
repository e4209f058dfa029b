"""Transfer engines: how bytes get from Prefill's memory into Decode's.

`create_engine(backend, options)` makes one; the contract is `TransferEngine` in `rd2h.engines.base`.
"""

from __future__ import annotations

from typing import TypeVar

from rd2h.engines.base import (
    READ_OK,
    AddressArray,
    EngineRole,
    MemoryRegion,
    ReadCode,
    ReadResult,
    TransferEngine,
    check_descriptors,
    merge_regions,
)
from rd2h.engines.options import (
    EngineOptions,
    HostOptions,
    MemfabricOptions,
    MemfabricProtocol,
    MemfabricTls,
    NullOptions,
)
from rd2h.errors import ConfigError

_Options = TypeVar("_Options", HostOptions, MemfabricOptions, NullOptions)

BACKENDS = ("memfabric", "host", "null")
"""Values of `transfer_backend`."""


def create_engine(backend: str, options: EngineOptions | None = None) -> TransferEngine:
    """A new engine, not yet initialised. Raises ConfigError for an unknown backend or options of another one.

    `options` may be None for engines that have defaults for everything (`host`, `null`).
    """
    if backend == "host":
        from rd2h.engines.host import HostEngine

        return HostEngine(_options_for(backend, options, HostOptions, HostOptions()))
    if backend == "memfabric":
        from rd2h.engines.memfabric import MemfabricEngine

        return MemfabricEngine(_options_for(backend, options, MemfabricOptions, None))
    if backend == "null":
        from rd2h.engines.null import NullEngine

        return NullEngine(_options_for(backend, options, NullOptions, NullOptions()))
    raise ConfigError.bad_value("transfer_backend", backend, BACKENDS)


def _options_for(
    backend: str, options: EngineOptions | None, kind: type[_Options], default: _Options | None
) -> _Options:
    if options is None and default is not None:
        return default
    if not isinstance(options, kind):
        raise ConfigError(
            f"engine {backend} needs {kind.__name__}, got {type(options).__name__}", key="transfer_backend"
        )
    return options


__all__ = [
    "BACKENDS",
    "READ_OK",
    "AddressArray",
    "EngineOptions",
    "EngineRole",
    "HostOptions",
    "MemfabricOptions",
    "MemfabricProtocol",
    "MemfabricTls",
    "MemoryRegion",
    "NullOptions",
    "ReadCode",
    "ReadResult",
    "TransferEngine",
    "check_descriptors",
    "create_engine",
    "merge_regions",
]
