"""vLLM attention backends of the reference model: paged main KV, and main KV in a host pool behind a hot buffer."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata

from rd2h.reference.batch import SparseBatch
from rd2h.reference.caches import IndexerCache, PagedMain
from rd2h.reference.resident import ResidentMain

RequestKeys = Callable[[], torch.Tensor]


class SparseBatchBuilder(AttentionMetadataBuilder[SparseBatch]):
    """Builds one ``SparseBatch`` a step. ``request_keys`` is set by the runner of an engine that offloads."""

    request_keys: RequestKeys | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseBatch:
        """The batch of this step."""
        common = common_attn_metadata
        return SparseBatch.of(
            common.query_start_loc_cpu,
            common.seq_lens.cpu(),
            common.block_table_tensor.cpu(),
            common.slot_mapping.cpu(),
            self.request_keys() if self.request_keys is not None else None,
        )


class ReferenceBackend(AttentionBackend):
    """What the backends have in common."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_builder_cls() -> type[SparseBatchBuilder]:
        """The builder of the step's batch."""
        return SparseBatchBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Attention sees the indexer's selection only."""
        return True


class PagedSparseBackend(ReferenceBackend):
    """Main KV in vLLM's paged cache."""

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "RD2H_REFERENCE_PAGED"

    @staticmethod
    def get_impl_cls() -> Any:
        """What stores and attends."""
        return PagedMain


class ResidentSparseBackend(ReferenceBackend):
    """Main KV in a host pool, attention over the hot buffer."""

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "RD2H_REFERENCE_RESIDENT"

    @staticmethod
    def get_impl_cls() -> Any:
        """What stores and attends."""
        return ResidentMain


class IndexerBackend(ReferenceBackend):
    """The indexer's keys in vLLM's paged cache."""

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "RD2H_REFERENCE_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        """What stores and selects."""
        return IndexerCache
