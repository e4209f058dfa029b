"""A composite with the phases of the platform's own one (not vLLM's, not ours): what it reads of its members."""

from collections.abc import Sequence
from typing import Any


class PlatformComposite:
    """Members in configuration order, one role."""

    def __init__(self, members: Sequence[Any], worker: bool) -> None:
        self.members = list(members)
        self.providers = [
            member
            for member in members
            if worker
            and member._kv_transfer_config.is_kv_producer
            and getattr(member, "supports_layerwise_buffer_reuse", False)
            and callable(getattr(member, "wait_for_layer_reuse", None))
        ]
        self.sink = None
        for member in members:
            hand_over = getattr(member, "set_external_slot_release_waiter", None)
            if self.providers and hand_over is not None and hand_over(self._wait_all) is not False:
                self.sink = member

    def _wait_all(self, layer_idx: int) -> None:
        for provider in self.providers:
            provider.wait_for_layer_reuse(layer_idx)

    def _rest(self) -> list[Any]:
        return [member for member in self.members if member not in self.providers]

    def wait_for_layer_load(self, layer_name: str) -> None:
        for member in self._rest() if self.sink is not None else [*self.providers, *self._rest()]:
            member.wait_for_layer_load(layer_name)

    def on_kv_cache_written(self, layer_name: str) -> None:
        for member in [*self.providers, *self._rest()]:
            hook = getattr(member, "on_kv_cache_written", None)
            if hook is not None:
                hook(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        for member in [*self.providers, *self._rest()]:
            member.save_kv_layer(layer_name, kv_layer, attn_metadata)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int, chosen: int | None) -> None:
        for index, member in enumerate(self.members):
            if index == chosen or getattr(member, "requires_full_blocks_on_update_after_alloc", False):
                member.update_state_after_alloc(request, blocks, tokens)
            else:
                member.update_state_after_alloc(request, blocks.new_empty(), 0)
