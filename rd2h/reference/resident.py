"""Main KV of one layer in the host pool; attention reads the hot buffer that the offload manager keeps filled."""

from typing import Protocol

import torch

from rd2h.errors import StateError
from rd2h.reference.batch import SparseBatch
from rd2h.reference.sparse_attention import attend


class OffloadManager(Protocol):
    """What is used of ``rd2h.offload.manager.SparseKVOffloadManager``; see there."""

    max_rows: int
    dtype: torch.dtype

    def append(self, layer_name: str, k_new: torch.Tensor, v_new: torch.Tensor, slot_mapping: torch.Tensor) -> None: ...

    def gather(
        self,
        layer_name: str,
        topk: torch.Tensor,
        request_keys: torch.Tensor,
        stable_prefix: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> torch.Tensor: ...

    def reuse(self, layer_name: str, source_layer_name: str) -> torch.Tensor: ...

    def hot_buffers(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]: ...


class ResidentMain:
    """A ``MainStore`` over an offload manager. A row of the hot buffer serves one token of the step."""

    def __init__(self, layer_name: str, source_name: str) -> None:
        """``source_name``: the layer whose selection this one attends to; its own name where it has an indexer."""
        self._name, self._source = layer_name, source_name
        self._manager: OffloadManager | None = None

    def bind(self, manager: OffloadManager) -> None:
        """The manager is made; it knows this layer."""
        self._manager = manager

    def append(self, batch: SparseBatch, latents: torch.Tensor, ropes: torch.Tensor) -> None:
        """See MainStore: the rows go straight into the host pool."""
        manager = self._bound()
        manager.append(self._name, latents.to(manager.dtype), ropes.to(manager.dtype), batch.slots)

    def attend(
        self,
        batch: SparseBatch,
        latent_queries: torch.Tensor,
        rope_queries: torch.Tensor,
        topk: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See MainStore. A step with more tokens than the hot buffer has rows takes several turns.

        Decode never has such a step, unless it must compute a prompt itself, as after a preemption.
        """
        manager = self._bound()
        if len(topk) <= manager.max_rows:
            rows = slice(0, len(topk))
            slots = self._gather(batch, topk, rows) if self._source == self._name else self._reuse()
            return self._over_hot_buffer(slots, latent_queries, rope_queries, scale)
        turns = []
        for begin in range(0, len(topk), manager.max_rows):
            rows = slice(begin, begin + manager.max_rows)
            slots = self._gather(batch, topk, rows)
            turns.append(self._over_hot_buffer(slots, latent_queries[rows], rope_queries[rows], scale))
        return torch.cat(turns)

    def _gather(self, batch: SparseBatch, topk: torch.Tensor, rows: slice) -> torch.Tensor:
        if batch.request_keys is None:
            raise StateError("a step of an engine that offloads came without request keys")
        requests = batch.token_requests[rows]
        # uint64 tensors cannot be indexed in every release of PyTorch; the bits are the same as int64.
        keys = batch.request_keys.view(torch.int64)[requests].view(torch.uint64)
        # This step writes a request's rows from its computed tokens on: what was there before may be stale.
        return self._bound().gather(
            self._name, topk[rows], keys, batch.computed[requests], batch.block_tables[requests]
        )

    def _reuse(self) -> torch.Tensor:
        return self._bound().reuse(self._name, self._source)

    def _over_hot_buffer(
        self, slots: torch.Tensor, latent_queries: torch.Tensor, rope_queries: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, ropes = self._bound().hot_buffers(self._name)
        present = slots >= 0
        rows = torch.arange(len(slots)).unsqueeze(1)
        chosen = slots.long().clamp_min(0)
        return attend(latent_queries, rope_queries, keys[rows, chosen], ropes[rows, chosen], present, scale)

    def _bound(self) -> OffloadManager:
        if self._manager is None:
            raise StateError(f"{self._name!r} has no offload manager yet")
        return self._manager
