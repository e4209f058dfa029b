"""Resolves the name ``MultiConnector``: our composite where its members contain our connector, else whose name it was.

vLLM asks its registry for a class before anybody can look at the configuration, so the registry gets a subclass of the
class that owned the name. That subclass changes one thing: which class the instance is of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rd2h import startup
from rd2h.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

CONNECTOR = "SfaRemoteD2HConnector"
CONNECTORS_KEY = "kv_connector_extra_config.connectors"


def members_that_are_ours(extra_config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Entries of the configured members that resolve to our connector; raises ConfigError for more than one.

    A member of that name may be another package's: what its module path or the registry say counts.
    """
    members = (extra_config or {}).get("connectors")
    if not isinstance(members, list):
        return []
    named = [member for member in members if isinstance(member, Mapping) and member.get("kv_connector") == CONNECTOR]
    ours = [member for member in named if is_ours(member.get("kv_connector_module_path"))]
    if len(ours) > 1:
        raise ConfigError(f"{CONNECTORS_KEY} has {len(ours)} members {CONNECTOR}; expected one", key=CONNECTORS_KEY)
    return ours


def check_members(transfer: Any, *, offload: bool) -> None:
    """Check what a composite's ``KVTransferConfig`` says for all members, whatever their own entries say: the role, by
    which vLLM knows that steps still write into blocks that it frees, and the policy of failed loads.

    Raises ConfigError.
    """
    extra = transfer.kv_connector_extra_config or {}
    for member in members_that_are_ours(extra):
        role = member.get("kv_role")
        producer = startup.is_producer(role)
        if transfer.kv_role not in (role, "kv_both"):
            raise ConfigError.bad_value(
                "kv_role", transfer.kv_role, f"{role!r}, as of the member {CONNECTOR}, or 'kv_both'"
            )
        startup.check_load_failures(
            getattr(transfer, "kv_load_failure_policy", "fail"),
            producer=producer,
            siblings=len(extra["connectors"]) > 1,
            offload=offload,
        )


def is_ours(module_path: str | None) -> bool:
    """Whether the name ``SfaRemoteD2HConnector`` with this ``kv_connector_module_path`` means our class."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from rd2h.connector import SfaRemoteD2HConnector

    found = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector=CONNECTOR, kv_connector_module_path=module_path, kv_role="kv_both")
    )
    return isinstance(found, type) and issubclass(found, SfaRemoteD2HConnector)


def choosing(owner: type[Any]) -> type[Any]:
    """A subclass of ``owner`` whose instances are our composite or ``owner`` itself, by their configuration."""

    class ChosenMultiConnector(owner):
        """Never an instance itself: neither of the classes it returns derives from it."""

        def __new__(
            cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, *rest: Any
        ) -> Any:
            from rd2h.composition.multi_connector import MultiConnector

            transfer = vllm_config.kv_transfer_config
            ours = members_that_are_ours(transfer.kv_connector_extra_config if transfer is not None else None)
            chosen: type[Any] = MultiConnector if ours else owner
            logger.info("rd2h: MultiConnector is %s.%s", chosen.__module__, chosen.__qualname__)
            return chosen(vllm_config, role, kv_cache_config, *rest)

    ChosenMultiConnector.__name__ = ChosenMultiConnector.__qualname__ = owner.__name__
    return ChosenMultiConnector


class MultiConnectorLoader:
    """Entry of vLLM's connector registry: loads the choice when asked, and the owner's class not before."""

    def __init__(self, load_owner: Callable[[], type[Any]]) -> None:
        self.load_owner = load_owner
        self._loaded: type[Any] | None = None

    def __call__(self) -> type[Any]:
        if self._loaded is None:
            self._loaded = choosing(self.load_owner())
        return self._loaded
