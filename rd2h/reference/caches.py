"""The paged caches of one layer: main (latent and rope part) and the indexer's keys."""

import itertools
from typing import Protocol

import torch

from rd2h.errors import StateError
from rd2h.reference.batch import SparseBatch
from rd2h.reference.paged import leading_rows, rows_at, slots_of, write_rows
from rd2h.reference.selection import dequantize, index_scores, quantize, select_topk
from rd2h.reference.sparse_attention import attend

ROWS_AT_ONCE = 256
"""Tokens that are attended or scored together, so that long chunks need no more memory."""


class MainStore(Protocol):
    """Where a layer's main KV lives, and attention over a selection of it."""

    def append(self, batch: SparseBatch, latents: torch.Tensor, ropes: torch.Tensor) -> None:
        """Store the step's rows: float64[tokens, rank] and [tokens, rope]."""

    def attend(
        self,
        batch: SparseBatch,
        latent_queries: torch.Tensor,
        rope_queries: torch.Tensor,
        topk: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of the step's tokens over the positions in ``topk`` (int64[tokens, topk], ABSENT where fewer)."""


class PagedMain:
    """Main KV in vLLM's paged cache: Prefill, ordinary engines, and Decode without offload."""

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, keys: torch.Tensor, ropes: torch.Tensor) -> None:
        """Cache tensors [blocks, block size, rank] and [blocks, block size, rope]."""
        self._tensors = keys, ropes

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bound tensors. Raises StateError before ``bind``."""
        if self._tensors is None:
            raise StateError("the main KV cache is not allocated yet")
        return self._tensors

    def append(self, batch: SparseBatch, latents: torch.Tensor, ropes: torch.Tensor) -> None:
        """See MainStore."""
        key_cache, rope_cache = self.tensors
        write_rows(key_cache, latents, batch.slots)
        write_rows(rope_cache, ropes, batch.slots)

    def attend(
        self,
        batch: SparseBatch,
        latent_queries: torch.Tensor,
        rope_queries: torch.Tensor,
        topk: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See MainStore."""
        key_cache, rope_cache = self.tensors
        outputs = []
        for begin in range(0, len(topk), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            present = topk[rows] >= 0
            tables = batch.block_tables[batch.token_requests[rows]]
            slots = slots_of(topk[rows].clamp_min(0), tables, key_cache.shape[1])
            keys, ropes = rows_at(key_cache, slots), rows_at(rope_cache, slots)
            outputs.append(attend(latent_queries[rows], rope_queries[rows], keys, ropes, present, scale))
        return torch.cat(outputs)


class IndexerCache:
    """The indexer's keys in vLLM's paged cache, always on the device; int8 with a scale, or plain."""

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None

    def bind(self, keys: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Cache tensors [blocks, block size, dim] and, for int8 keys, [blocks, block size, 1]."""
        self._keys, self._scales = keys, scales

    @property
    def keys(self) -> torch.Tensor:
        """The bound key tensor. Raises StateError before ``bind``."""
        if self._keys is None:
            raise StateError("the indexer's cache is not allocated yet")
        return self._keys

    def append(self, batch: SparseBatch, keys: torch.Tensor) -> None:
        """Store the step's keys, float64[tokens, dim]."""
        if self._scales is None:
            write_rows(self.keys, keys, batch.slots)
            return
        steps, scales = quantize(keys)
        write_rows(self.keys, steps, batch.slots)
        write_rows(self._scales, scales, batch.slots)

    def select(self, batch: SparseBatch, queries: torch.Tensor, weights: torch.Tensor, topk: int) -> torch.Tensor:
        """Positions that the step's tokens attend to, int64[tokens, topk]; ABSENT where there are fewer."""
        positions = batch.positions
        starts = batch.query_starts.tolist()
        chosen = []
        for request, (first, last) in enumerate(itertools.pairwise(starts)):
            keys = self._request_keys(batch, request)
            for begin in range(first, last, ROWS_AT_ONCE):
                rows = slice(begin, min(begin + ROWS_AT_ONCE, last))
                chosen.append(select_topk(index_scores(queries[rows], weights[rows], keys), positions[rows], topk))
        return torch.cat(chosen)

    def _request_keys(self, batch: SparseBatch, request: int) -> torch.Tensor:
        count, table = int(batch.seq_lens[request]), batch.block_tables[request]
        keys = leading_rows(self.keys, table, count)
        if self._scales is None:
            return keys.to(torch.float64)
        return dequantize(keys, leading_rows(self._scales, table, count))
