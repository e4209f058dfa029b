"""Refuses wrong settings while vLLM still builds its configuration, in the process that the user started.

Without this a connector is built only after the model's weights are loaded, in a child process; the user waits for
minutes and then sees "Engine core initialization failed" below the reason. vLLM has no hook at that point, but it asks
its connector factory whether the configured connector supports hybrid cache groups; we look at the settings first.
What needs more than the connector's settings is checked where the connector is built (``rd2h.startup``).
"""

import functools
from collections.abc import Mapping
from typing import Any

from rd2h.composition.choice import CONNECTOR, check_members, is_ours, members_that_are_ours
from rd2h.config import ConnectorConfig
from rd2h.startup import decode_base_port, is_producer

COMPOSITE = "MultiConnector"
DEFAULT_KV_PORT = 14579


def check_transfer_config(transfer: Any) -> None:
    """Check every use of our connector in a vLLM ``KVTransferConfig``. Raises ConfigError."""
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == CONNECTOR:
        if is_ours(transfer.kv_connector_module_path):
            _check(transfer.kv_role, transfer.kv_port, extra)
    elif transfer.kv_connector == COMPOSITE:
        for member in members_that_are_ours(extra):
            port = member.get("kv_port", DEFAULT_KV_PORT)
            _check(member.get("kv_role"), port, member.get("kv_connector_extra_config") or {})
        check_members(transfer, offload=False)


def _check(kv_role: object, kv_port: Any, extra: Mapping[str, object]) -> None:
    ConnectorConfig.parse(extra)
    if not is_producer(kv_role) and isinstance(kv_port, int):
        decode_base_port(kv_port, dp_rank=0, dp_size=1, tp_size=1)


def install(factory: Any) -> None:
    """Let vLLM's connector ``factory`` check settings when it is asked about hybrid cache groups; once."""
    ask = getattr(factory, "supports_hma_config", None)
    if ask is None or getattr(ask, "rd2h_checks", False):
        return

    @functools.wraps(ask)
    def supports_hma_config(cls: type[Any], kv_transfer_config: Any) -> Any:
        check_transfer_config(kv_transfer_config)
        return ask(kv_transfer_config)

    supports_hma_config.rd2h_checks = True  # type: ignore[attr-defined]
    factory.supports_hma_config = classmethod(supports_hma_config)
