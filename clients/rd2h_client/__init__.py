"""Client of the rd2h control plane: generated stubs and small asyncio, blocking and background clients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rd2h_client.addresses import AddressError as AddressError
    from rd2h_client.background import BackgroundMetaClient as BackgroundMetaClient
    from rd2h_client.background import ChildNotice as ChildNotice
    from rd2h_client.channels import OptionsError as OptionsError
    from rd2h_client.client import MetaClient as MetaClient
    from rd2h_client.engine_watch import EngineBatch as EngineBatch
    from rd2h_client.errors import ClientClosedError as ClientClosedError
    from rd2h_client.errors import MetaError as MetaError
    from rd2h_client.errors import MetaExhaustedError as MetaExhaustedError
    from rd2h_client.errors import MetaRefusedError as MetaRefusedError
    from rd2h_client.errors import MetaUnavailableError as MetaUnavailableError
    from rd2h_client.errors import QueueFullError as QueueFullError
    from rd2h_client.errors import RendezvousEndedError as RendezvousEndedError
    from rd2h_client.options import ClientOptions as ClientOptions
    from rd2h_client.options import KeepAliveOptions as KeepAliveOptions
    from rd2h_client.options import RetryOptions as RetryOptions
    from rd2h_client.options import TlsOptions as TlsOptions
    from rd2h_client.registration import EngineStatus as EngineStatus
    from rd2h_client.registration import Registration as Registration
    from rd2h_client.sync_client import SyncMetaClient as SyncMetaClient

_HOME = {
    "AddressError": "addresses",
    "BackgroundMetaClient": "background",
    "ChildNotice": "background",
    "ClientClosedError": "errors",
    "ClientOptions": "options",
    "EngineBatch": "engine_watch",
    "EngineStatus": "registration",
    "KeepAliveOptions": "options",
    "MetaClient": "client",
    "MetaError": "errors",
    "MetaExhaustedError": "errors",
    "MetaRefusedError": "errors",
    "MetaUnavailableError": "errors",
    "OptionsError": "channels",
    "QueueFullError": "errors",
    "Registration": "registration",
    "RendezvousEndedError": "errors",
    "RetryOptions": "options",
    "SyncMetaClient": "sync_client",
    "TlsOptions": "options",
}


def __getattr__(name: str) -> object:
    """Load public names on first use: the messages alone must not cost the import of gRPC."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
