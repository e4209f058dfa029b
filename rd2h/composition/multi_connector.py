"""The composite for vLLM: what vLLM's ``MultiConnector`` does, plus the phases that shared layer buffers need.

It differs from vLLM's class in six things, and in nothing else:

- completion providers run first in the layer hooks, and a sibling may take over their wait: see ``phases``;
- ``on_kv_cache_written`` is passed on, to the members that have it;
- a member with ``expect_load_results`` learns in every step which blocks no member could load (``note_load_results``);
- a member that asks for full block groups gets them, with the token count, even when another was chosen to load;
- every member gets its own handshake metadata back, not that of the first member that has any;
- parameters of one member only are returned for a finished request: see ``ReturnedParameters``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    supports_hma,
)

from rd2h import startup, vllm_compat
from rd2h.composition.choice import check_members
from rd2h.composition.phases import LayerPhases
from rd2h.composition.returned import ReturnedParameters

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

Finished = tuple[bool, dict[str, Any] | None]


class CompositeHandshake(KVConnectorHandshakeMetadata):
    """Handshake metadata of every member of one worker, in configuration order; None where a member has none."""

    def __init__(self, members: tuple[KVConnectorHandshakeMetadata | None, ...]) -> None:
        self.members = members


class MultiConnector(multi_connector.MultiConnector):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        offload = startup.offload_enabled(vllm_config.additional_config)
        check_members(vllm_config.kv_transfer_config, offload=offload)
        super().__init__(vllm_config, role, kv_cache_config)
        phases = LayerPhases(self._connectors if role is KVConnectorRole.WORKER else ())
        self._before_layer = phases.loaders("wait_for_layer_load")
        self._after_scatter = phases.writers("on_kv_cache_written")
        self._after_layer = phases.writers("save_kv_layer")
        self._sees_all_blocks = [
            getattr(member, "requires_full_blocks_on_update_after_alloc", False) is True for member in self._connectors
        ]
        self._returned = ReturnedParameters()
        listeners = [member for member in self._connectors if callable(getattr(member, "expect_load_results", None))]
        self._load_listeners = listeners if len(self._connectors) > 1 else []
        for listener in self._load_listeners:
            listener.expect_load_results()
        if phases.providers:
            logger.info(
                "rd2h: completion providers %s run first; %s",
                _names(phases.providers),
                f"the wait for layer buffers is taken over by {_names(phases.sinks)}" if phases.sinks else "they wait",
            )

    # --- worker half ---

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Providers first, then the others; the others alone when one of them owns the wait."""
        for hook in self._before_layer:
            hook(layer_name)

    def on_kv_cache_written(self, layer_name: str) -> None:
        """A layer's KV has been scattered: providers close their gates before the others learn of it."""
        for hook in self._after_scatter:
            hook(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer is computed: providers first."""
        for hook in self._after_layer:
            hook(layer_name, kv_layer, attn_metadata, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a member could not load in this step, told to those who wait for it."""
        invalid: set[int] = super().get_block_ids_with_load_errors()
        for listener in self._load_listeners:
            listener.note_load_results(invalid)
        return invalid

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What every member of this worker tells its scheduler half; None when none has anything to tell."""
        members = tuple(member.get_handshake_metadata() for member in self._connectors)
        return CompositeHandshake(members) if any(item is not None for item in members) else None

    # --- scheduler half ---

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Each member gets its own workers' metadata."""
        for index, member in enumerate(self._connectors):
            member.set_xfer_handshake_metadata(_of_member(metadata, index))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As ``set_xfer_handshake_metadata``, by (pipeline rank, tensor rank)."""
        for index, member in enumerate(self._connectors):
            member.set_xfer_handshake_metadata_pp_aware(_of_member(metadata, index))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks and token count to the chosen member and to those that ask for all; the rest has nothing to load."""
        chosen = self._requests_to_connector.get(request.request_id)
        for index, member in enumerate(self._connectors):
            if index == chosen or self._sees_all_blocks[index]:
                member.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                member.update_state_after_alloc(request, vllm_compat.blocks_without_load(blocks), 0)

    def request_finished(self, request: Request, blocks: list[int]) -> Finished:
        """Every member learns of it; blocks are kept while any member saves."""
        return self._finish(request, lambda member: member.request_finished(request, blocks))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        """As ``request_finished``, for any number of cache groups (one, where a member knows no more)."""

        def finish(member: Any) -> Finished:
            if supports_hma(member):
                finished: Finished = member.request_finished_all_groups(request, block_ids)
            else:
                (only,) = block_ids
                finished = member.request_finished(request, only)
            return finished

        return self._finish(request, finish)

    def _finish(self, request: Request, finish: Callable[[Any], Finished]) -> Finished:
        answers = [(type(member).__name__, *finish(member)) for member in self._connectors]
        saving = sum(1 for _, saves, _ in answers if saves)
        if saving > 1:
            # The worker half swallows this many reports before the last one frees the blocks.
            self._extra_async_saves[request.request_id] = saving - 1
        self._requests_to_connector.pop(request.request_id, None)
        return saving > 0, self._returned.of(request.request_id, [(name, params) for name, _, params in answers])


def _of_member(metadata: dict[Any, Any], index: int) -> dict[Any, KVConnectorHandshakeMetadata]:
    return {
        rank: item.members[index]
        for rank, item in metadata.items()
        if isinstance(item, CompositeHandshake) and item.members[index] is not None
    }


def _names(members: tuple[Any, ...]) -> str:
    return ", ".join(type(member).__name__ for member in members)
