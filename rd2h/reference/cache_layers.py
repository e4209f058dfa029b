"""The two cache-bearing layers that vLLM sees for each attention layer of the model: main, and the indexer's keys."""

from abc import abstractmethod
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from rd2h.errors import ConfigError, StateError
from rd2h.offload.config import SparseOffloadConfig
from rd2h.reference.backend import IndexerBackend, PagedSparseBackend, ResidentSparseBackend
from rd2h.reference.caches import IndexerCache, MainStore, PagedMain
from rd2h.reference.resident import OffloadManager, ResidentMain

SCALE_BYTES = 2


class CacheLayer(AttentionLayerBase):
    """Puts itself into vLLM's static forward context, where runner and scheduler find it."""

    def __init__(self, name: str, vllm_config: VllmConfig) -> None:
        context = vllm_config.compilation_config.static_forward_context
        if name in context:
            raise ConfigError(f"two cache layers are named {name!r}")
        context[name] = self
        self.name = name
        # A tuple also keeps vLLM from zeroing or copying blocks in caches of whose inside it knows nothing.
        self.kv_cache: tuple[torch.Tensor | None, ...] = ()

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """New cache tensors, bound to the layer's store."""


class MainCacheLayer(CacheLayer):
    """Main KV of one layer: the latent (called K here, as in vLLM-Ascend's tuples) and the rotated key part (V)."""

    def __init__(self, name: str, source_name: str, rank: int, rope: int, vllm_config: VllmConfig) -> None:
        """``source_name``: main layer of the layer whose indexer selects for this one."""
        super().__init__(name, vllm_config)
        self.rank, self.rope = rank, rope
        offload = SparseOffloadConfig.read(vllm_config.additional_config).enabled
        self.impl: Any = ResidentMain(name, source_name) if offload else PagedMain()

    @property
    def store(self) -> MainStore:
        """Where the KV goes."""
        store: MainStore = self.impl
        return store

    def get_attn_backend(self) -> Any:
        """vLLM's view of the store."""
        return PagedSparseBackend if isinstance(self.impl, PagedMain) else ResidentSparseBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        """One vector of rank + rope features a token; vLLM's budget counts it wherever it lies."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.rank + self.rope,
            dtype=vllm_config.model_config.dtype,
        )

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """New K and V tensors, bound to the store. Raises StateError on an engine that offloads."""
        if not isinstance(self.impl, PagedMain):
            raise StateError(f"main KV of {self.name!r} lives in the host pool, it has no device pages")
        keys = torch.zeros(num_blocks, block_size, self.rank, dtype=dtype)
        ropes = torch.zeros(num_blocks, block_size, self.rope, dtype=dtype)
        self.impl.bind(keys, ropes)
        self.kv_cache = (keys, ropes)
        return self.kv_cache

    def bind_pool(
        self, manager: OffloadManager, k_pool: torch.Tensor | None, v_pool: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Bind the host pool: (no device K, no device V, K and V in the pool on rank 0, hot K, hot V)."""
        if not isinstance(self.impl, ResidentMain):
            raise StateError(f"main KV of {self.name!r} lives in vLLM's paged cache, not in a host pool")
        self.impl.bind(manager)
        self.kv_cache = (None, None, k_pool, v_pool, *manager.hot_buffers(self.name))
        return self.kv_cache


class IndexerCacheLayer(CacheLayer):
    """Keys of one layer's indexer; int8 keys have a float16 scale tensor beside them."""

    def __init__(self, name: str, dim: int, int8: bool, vllm_config: VllmConfig) -> None:
        super().__init__(name, vllm_config)
        self.dim, self.int8 = dim, int8
        self.impl: Any = IndexerCache()

    @property
    def store(self) -> IndexerCache:
        """Where the keys go."""
        store: IndexerCache = self.impl
        return store

    def get_attn_backend(self) -> Any:
        """vLLM's view of the store."""
        return IndexerBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        """One key a token, with its scale where it has one."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.dim + SCALE_BYTES if self.int8 else self.dim,
            dtype=torch.int8 if self.int8 else vllm_config.model_config.dtype,
        )

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """New tensors, bound to the store: keys, and scales for int8 keys."""
        if self.int8:
            keys = torch.zeros(num_blocks, block_size, self.dim, dtype=torch.int8)
            scales = torch.zeros(num_blocks, block_size, 1, dtype=torch.float16)
            self.store.bind(keys, scales)
            self.kv_cache = (keys, scales)
        else:
            keys = torch.zeros(num_blocks, block_size, self.dim, dtype=dtype)
            self.store.bind(keys)
            self.kv_cache = (keys,)
        return self.kv_cache
