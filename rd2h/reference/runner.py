"""The model runner of the reference engines: vLLM's CPU runner with cache tensors of our own shapes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rd2h.errors import StateError
from rd2h.offload.manager import SparseKVOffloadManager
from rd2h.reference.backend import SparseBatchBuilder
from rd2h.reference.cache_layers import CacheLayer, MainCacheLayer
from rd2h.reference.lives import RequestLives
from rd2h.reference.offloading import make_manager, settings_of

CacheTensors = tuple[torch.Tensor | None, ...]


class ReferenceModelRunner(CPUModelRunner):
    """Each layer's K, V, indexer keys and scales are tensors of their own, as on Ascend.

    On a Decode engine that offloads, main KV gets no device pages: the manager's host pool takes its place.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.offload = settings_of(vllm_config)
        self.manager: SparseKVOffloadManager | None = None
        self._lives = RequestLives()

    def initialize_metadata_builders(self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]) -> None:
        """Let the builders of an engine that offloads ask who the requests of the batch are."""
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        if not self.offload.enabled:
            return
        for group in self._attn_group_iterator():
            builder = group.get_metadata_builder()
            if isinstance(builder, SparseBatchBuilder):
                builder.request_keys = self._request_keys

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
        num_blocks = kv_cache_config.num_blocks
        if self.offload.enabled:
            self.manager = make_manager(self.offload, self.vllm_config, num_blocks)
        caches = {
            name: self._allocate_layer(name, num_blocks)
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }
        self.kv_caches.extend(_device_tensors(caches))
        return caches

    def _allocate_layer(self, name: str, num_blocks: int) -> CacheTensors:
        layer = self.compilation_config.static_forward_context[name]
        if not isinstance(layer, CacheLayer):
            raise StateError(f"{name!r} is a {type(layer).__name__}, expected a cache layer of the model")
        if self.manager is None or not isinstance(layer, MainCacheLayer):
            return layer.allocate(num_blocks, self.cache_config.block_size, self.model_config.dtype)
        if not self.manager.k_caches_cpu:
            return layer.bind_pool(self.manager, None, None)
        index = self.manager.offload_layer_names.index(name)
        return layer.bind_pool(self.manager, self.manager.k_caches_cpu[index], self.manager.v_caches_cpu[index])

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        self._lives.end(scheduler_output.finished_req_ids)
        self._lives.begin(new.req_id for new in scheduler_output.scheduled_new_reqs)
        self._lives.begin(sorted(scheduler_output.scheduled_cached_reqs.resumed_req_ids))
        callback: Callable[..., Any] | None = super()._update_states(scheduler_output)
        return callback

    def _request_keys(self) -> torch.Tensor:
        return self._lives.keys(self.input_batch.req_ids)


def _device_tensors(caches: Mapping[str, CacheTensors]) -> list[torch.Tensor]:
    """Paged tensors only: vLLM may copy blocks inside them."""
    return [tensor for tensors in caches.values() if tensors[0] is not None for tensor in tensors if tensor is not None]
