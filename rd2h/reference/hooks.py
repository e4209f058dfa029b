"""The connector's per-layer calls, in the order of vLLM-Ascend's sparse attention layers.

Before anything of the layer is written: ``wait_for_layer_load``. After main and indexer are in the cache:
``on_kv_cache_written``. After attention: ``save_kv_layer``.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import get_forward_context

from rd2h.reference.batch import SparseBatch


def current_batch(layer_name: str) -> SparseBatch | None:
    """The step's batch; None while vLLM profiles or warms up."""
    metadata = get_forward_context().attn_metadata
    batch: SparseBatch | None = metadata[layer_name] if isinstance(metadata, dict) else None
    return batch


@dataclass(frozen=True, slots=True)
class LayerHooks:
    """Calls of one layer in one step; nothing where there is no connector or it has no work bound."""

    layer_name: str
    connector: Any

    @classmethod
    def of(cls, layer_name: str) -> "LayerHooks":
        """Hooks to the engine's connector, if this step has one."""
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        bound = connector is not None and connector.has_connector_metadata()
        return cls(layer_name, connector if bound else None)

    def before_writes(self) -> None:
        """Nothing of the layer has been written yet."""
        if self.connector is not None:
            self.connector.wait_for_layer_load(self.layer_name)

    def written(self) -> None:
        """Main and indexer rows of the step are in the caches. vLLM's own base class does not know this call."""
        announce = getattr(self.connector, "on_kv_cache_written", None)
        if announce is not None:
            announce(self.layer_name)

    def done(self, kv_cache: Any, batch: SparseBatch) -> None:
        """The layer's attention is computed."""
        if self.connector is not None:
            self.connector.save_kv_layer(self.layer_name, kv_cache, batch)
