"""``SparseKVOffloadManager``: main KV of all layers in the host pool, the rows that attention needs in the hot buffer.

One object per worker process. The attributes that a connector reads have the names of vllm-ascend's manager
(``offload_layer_names``, ``k_caches_cpu``, ``v_caches_cpu``, ``gvas_k_bases``, ``gvas_v_bases``, ``cpu_block_lens``,
``_get_offload_layer_id``) and do not change after construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rd2h.errors import ConfigError, StateError
from rd2h.offload.budget import check_dram
from rd2h.offload.config import SparseOffloadConfig
from rd2h.offload.copier import HostCopier, RowCopier
from rd2h.offload.counters import OffloadCounters
from rd2h.offload.kernel import load_kernel
from rd2h.offload.layers import LayerMemory, OffloadLayer, Shape, integers, pool_tensor
from rd2h.offload.pool import PoolAllocator, PoolLayout
from rd2h.offload.residency import Geometry, Int64s, Question
from rd2h.offload.selections import Selections

__all__ = ["OffloadLayer", "SparseKVOffloadManager", "current_manager", "get_sparse_kv_offload_manager"]


class SparseKVOffloadManager:
    """See the module. Calls come from the thread that runs the model; a connector's threads only read attributes.

    All TP ranks call ``append``, ``gather`` and ``reuse`` in the same order with the same selections. Rank 0 alone
    writes; ``barrier`` lets the others read only afterwards. That they have read before rank 0 writes the next step's
    rows of the same layer is what the model's own collectives ensure.
    """

    def __init__(
        self,
        config: SparseOffloadConfig,
        layers: Sequence[OffloadLayer],
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        index_topk: int,
        tp_rank: int,
        tp_size: int,
        allocator: PoolAllocator,
        barrier: Callable[[], None],
        *,
        device: str = "cpu",
        copier: RowCopier | None = None,
        register: bool = True,
    ) -> None:
        """Allocates pool and hot buffers. Raises ConfigError when they cannot fit, StateError for a second manager.

        ``register``: become the process's manager (``get_sparse_kv_offload_manager``).
        """
        if register and _current:
            raise StateError("this process has a sparse offload manager already; close it first")
        if not layers or len({layer.name for layer in layers}) != len(layers):
            raise ConfigError(f"{len(layers)} offload layers, expected at least one and no name twice")
        names = [layer.name for layer in layers]
        self.config, self.dtype, self.num_blocks, self.block_size = config, dtype, num_blocks, block_size
        self.max_rows, self.tp_rank, self.tp_size = max_rows, tp_rank, tp_size
        geometry = Geometry(max_rows, config.topk_buffer_size, index_topk, block_size, num_blocks)
        self._barrier = barrier
        self._counters, self._taken = OffloadCounters(), OffloadCounters()
        self._closed = False

        block_bytes = dtype.itemsize * block_size
        layout = PoolLayout.plan(
            [(layer.kv_lora_rank * block_bytes, layer.rope_dim * block_bytes) for layer in layers], num_blocks
        )
        check_dram(config, layout.num_bytes)
        try:
            self._pool = allocator.allocate(layout.num_bytes)
        finally:
            # Also a rank that has failed: vLLM hears of it only when those before it have answered.
            self._meet()
        kernel = load_kernel()
        self._selections = Selections(names, geometry, kernel)
        self._copier = copier if copier is not None else HostCopier(kernel)

        self.offload_layer_names = names
        self.gvas_k_bases = [self._pool.base + span.k_offset for span in layout.spans]
        self.gvas_v_bases = [self._pool.base + span.v_offset for span in layout.spans]
        self.cpu_block_lens = [(span.k_block_bytes, span.v_block_bytes) for span in layout.spans]
        self.k_caches_cpu: list[torch.Tensor] = []
        self.v_caches_cpu: list[torch.Tensor] = []
        shape = Shape(num_blocks, block_size, max_rows, config.topk_buffer_size, dtype, device)
        self._ids = {name: index for index, name in enumerate(names)}
        self._layers: dict[str, LayerMemory] = {}
        for layer, span in zip(layers, layout.spans, strict=True):
            self._layers[layer.name] = LayerMemory.make(layer, span, self._pool, shape)
            if tp_rank == 0:
                self.k_caches_cpu.append(pool_tensor(self._pool, span.k_offset, layer.kv_lora_rank, shape))
                self.v_caches_cpu.append(pool_tensor(self._pool, span.v_offset, layer.rope_dim, shape))
        self._hot_bytes = sum(memory.hot_bytes for memory in self._layers.values())
        if register:
            _current.append(self)

    # --- what a connector reads ---

    def _get_offload_layer_id(self, layer_name: str) -> int:
        """Position of a layer in the lists. Raises KeyError for a name that is not offloaded."""
        return self._ids[layer_name]

    # --- the model's side ---

    def append(self, layer_name: str, k_new: Any, v_new: Any, slot_mapping: Any) -> None:
        """Write the step's new rows into the pool.

        ``k_new`` [n, kv_lora_rank] and ``v_new`` [n, rope_dim] of the manager's dtype, ``slot_mapping`` int64[n] =
        block * block_size + offset; slots outside the pool are ignored (padding, dummy runs). Every rank calls it, rank
        0 writes. Raises StateError for shapes that do not fit.
        """
        layer = self._layer(layer_name)
        if self.tp_rank != 0:
            return
        slots = integers(slot_mapping, np.int64)
        k_rows, v_rows = layer.new_rows(k_new, v_new, len(slots))
        inside = np.flatnonzero((slots >= 0) & (slots < layer.k_pool.num_rows))
        started = perf_counter()
        moved = self._copier.copy(((layer.k_pool, k_rows), (layer.v_pool, v_rows)), slots[inside], inside)
        self._counters.note_append(len(inside), moved, perf_counter() - started)

    def gather(
        self, layer_name: str, topk: Any, request_keys: Any, stable_prefix: Any, block_tables: Any
    ) -> torch.Tensor:
        """Bring the selected tokens into the hot buffer; returns their slots, int32[rows, topk], -1 for absent.

        ``topk`` int64[rows, topk] logical positions (negative: absent), ``request_keys`` uint64[rows] (0: padding),
        ``stable_prefix`` int64[rows], ``block_tables`` int32[rows, max_blocks]. Raises StateError for a position or
        block out of range, TransferError when the copy failed; after an error nothing counts as resident. ``topk``,
        ``block_tables`` and the answer are not copied: they stay unchanged until the last ``reuse`` of the selection.
        """
        layer = self._layer(layer_name)
        self._meet()
        question = Question(
            integers(topk, np.int64),
            integers(request_keys, np.uint64),
            integers(stable_prefix, np.int64),
            integers(block_tables, np.int32),
        )
        with self._selections.choose(layer_name, question) as plan:
            self._fetch(layer, plan.targets, plan.sources)
        self._counters.note_plan(plan)
        return torch.from_numpy(plan.slots)

    def reuse(self, layer_name: str, source_layer_name: str) -> torch.Tensor:
        """As ``gather``, with the selection that ``source_layer_name`` gathered in this step.

        A layer that follows in every step copies the source's misses from its own pool. One that has skipped a step
        copies the whole selection, and the source starts over at its next ``gather``, so that both stay equal.
        """
        layer, _ = self._layer(layer_name), self._layer(source_layer_name)
        self._meet()
        with self._selections.take_over(layer_name, source_layer_name) as takeover:
            self._fetch(layer, takeover.targets, takeover.sources)
        self._counters.resyncs += takeover.resync
        return torch.from_numpy(takeover.slots)

    def hot_buffers(self, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(K [max_rows, capacity, kv_lora_rank], V [max_rows, capacity, rope_dim]) of a layer."""
        layer = self._layer(layer_name)
        return layer.k_hot, layer.v_hot

    # --- counters and end ---

    def stats(self) -> dict[str, float]:
        """Counters since the start, and sizes in bytes."""
        main_bytes = self.num_blocks * sum(k + v for k, v in self.cpu_block_lens)
        return {
            **self._counters.values(),
            "pool_bytes": self._pool.num_bytes,
            "pool_touched_bytes": self._touched_bytes(),
            "hot_bytes": self._hot_bytes,
            "device_bytes_saved": main_bytes - self._hot_bytes,
        }

    def take_stats(self) -> Mapping[str, float]:
        """Counters since the last call and sizes, under the names of the connector's statistics; empty if idle."""
        now = self._counters.copy()
        gathered, self._taken = now.since(self._taken), now
        if not gathered:
            return {}
        return {
            **gathered,
            "offload_pool_bytes": self._pool.num_bytes,
            "offload_pool_touched_bytes": self._touched_bytes(),
            "offload_hot_bytes": self._hot_bytes,
        }

    def close(self) -> None:
        """Give the pool back; the caller has ended whatever writes into it. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self in _current:
            _current.remove(self)
        self._layers.clear()
        self.k_caches_cpu, self.v_caches_cpu = [], []
        self._pool.close()

    # --- inside ---

    def _layer(self, name: str) -> LayerMemory:
        try:
            return self._layers[name]
        except KeyError:
            state = "the manager is closed" if self._closed else f"offloaded are {self.offload_layer_names[:4]}..."
            raise StateError(f"{name!r} has no offloaded main KV; {state}") from None

    def _touched_bytes(self) -> int:
        return 0 if self._closed else self._pool.touched_bytes()

    def _meet(self) -> None:
        if self.tp_size > 1:
            self._barrier()

    def _fetch(self, layer: LayerMemory, targets: Int64s, sources: Int64s) -> None:
        started = perf_counter()
        moved = self._copier.copy(layer.pairs, targets, sources)
        self._counters.note_fetch(moved, perf_counter() - started)


_current: list[SparseKVOffloadManager] = []


def current_manager() -> SparseKVOffloadManager | None:
    """The process's manager, or None."""
    return _current[0] if _current else None


def get_sparse_kv_offload_manager() -> SparseKVOffloadManager:
    """The process's manager. Raises StateError when there is none (yet)."""
    if not _current:
        raise StateError("this process has no sparse offload manager")
    return _current[0]
