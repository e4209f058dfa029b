"""Sparse offload on a reference engine: settings, memory budget and manager from vLLM's configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.v1.kv_cache_interface import KVCacheSpec

from rd2h.errors import ConfigError
from rd2h.offload.budget import Budget, decode_rows, hot_buffer_bytes, plan_budget
from rd2h.offload.config import SECTION, SparseOffloadConfig
from rd2h.offload.manager import OffloadLayer, SparseKVOffloadManager
from rd2h.offload.pool import HostPoolAllocator
from rd2h.reference.cache_layers import CacheLayer, IndexerCacheLayer, MainCacheLayer

DTYPES = ("float32", "bfloat16", "float16")


def settings_of(vllm_config: VllmConfig, *, model_runner_v2: bool = False) -> SparseOffloadConfig:
    """Checked settings; ``enabled`` is false where the engine does not offload. Raises ConfigError."""
    text_config, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    config = SparseOffloadConfig.parse(
        _section(vllm_config),
        index_topk=text_config.index_topk,
        block_size=vllm_config.cache_config.block_size,
        kv_role=transfer.kv_role if transfer is not None else "none",
        main_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        supported_dtypes=DTYPES,
        context_parallel_size=parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        model_runner_v2=model_runner_v2,
    )
    if config.enabled and config.keep_device_kv_cache:
        raise ConfigError.bad_value(
            f"{SECTION}.keep_device_kv_cache",
            True,
            "false with the reference worker (main lies in the pool only)",
        )
    return config


def _section(vllm_config: VllmConfig) -> Mapping[str, Any]:
    additional = vllm_config.additional_config
    return additional if isinstance(additional, Mapping) else {}


def hot_rows(vllm_config: VllmConfig) -> int:
    """Rows of the hot buffer."""
    scheduler = vllm_config.scheduler_config
    return decode_rows(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)


def budget_of(
    config: SparseOffloadConfig, vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], available_bytes: int
) -> Budget:
    """Division of ``available_bytes`` of device memory: hot buffers first, the rest for the indexers' pages."""
    layers = cache_layers(vllm_config)
    itemsize = vllm_config.model_config.dtype.itemsize
    mains = [layer for layer in layers if isinstance(layer, MainCacheLayer)]
    hot = sum(
        hot_buffer_bytes(hot_rows(vllm_config), config.topk_buffer_size, layer.rank, layer.rope, itemsize)
        for layer in mains
    )
    return plan_budget(
        config,
        available_bytes,
        [specs[layer.name].page_size_bytes for layer in mains],
        [specs[layer.name].page_size_bytes for layer in layers if isinstance(layer, IndexerCacheLayer)],
        hot,
    )


def make_manager(config: SparseOffloadConfig, vllm_config: VllmConfig, num_blocks: int) -> SparseKVOffloadManager:
    """The worker's manager, with a pool that the tensor-parallel ranks share."""
    group = get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    layers = [
        OffloadLayer(layer.name, layer.rank, layer.rope)
        for layer in cache_layers(vllm_config)
        if isinstance(layer, MainCacheLayer)
    ]
    return SparseKVOffloadManager(
        config,
        layers,
        vllm_config.model_config.dtype,
        num_blocks,
        vllm_config.cache_config.block_size,
        hot_rows(vllm_config),
        vllm_config.model_config.hf_text_config.index_topk,
        rank,
        size,
        HostPoolAllocator(rank, size, lambda value: group.broadcast_object(value, src=0)),
        group.barrier,
    )


def cache_layers(vllm_config: VllmConfig) -> Sequence[CacheLayer]:
    """The model's cache layers in execution order."""
    context = vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if isinstance(layer, CacheLayer)]
