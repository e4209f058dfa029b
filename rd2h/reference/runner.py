"""The model runner of the reference engines: vLLM's CPU runner with cache tensors of our own shapes."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rd2h.errors import StateError
from rd2h.reference.cache_layers import CacheLayer


class ReferenceModelRunner(CPUModelRunner):
    """Each layer's K, V, indexer keys and scales are tensors of their own, as on Ascend."""

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Any]:
        """Allocate and bind the caches; returns a tuple of tensors per cache layer, for the connector."""
        block_size = self.cache_config.block_size
        if any(size != block_size for size in kernel_block_sizes):
            raise StateError(f"kernel block sizes {kernel_block_sizes} differ from the block size {block_size}")
        caches: dict[str, tuple[torch.Tensor, ...]] = {}
        for group in kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                layer = self.compilation_config.static_forward_context[name]
                if not isinstance(layer, CacheLayer):
                    raise StateError(f"{name!r} is a {type(layer).__name__}, expected a cache layer of the model")
                caches[name] = self.allocate_layer(layer, kv_cache_config.num_blocks)
        self.kv_caches.extend(tensor for tensors in caches.values() for tensor in tensors)
        return caches

    def allocate_layer(self, layer: CacheLayer, num_blocks: int) -> tuple[torch.Tensor, ...]:
        """Tensors of one cache layer."""
        return layer.allocate(num_blocks, self.cache_config.block_size, self.model_config.dtype)
