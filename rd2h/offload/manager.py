"""``SparseKVOffloadManager``: main KV of all layers in the host pool, the rows that attention needs in the hot buffer.

One object per worker process. The attributes that a connector reads have the names of vllm-ascend's manager
(``offload_layer_names``, ``k_caches_cpu``, ``v_caches_cpu``, ``gvas_k_bases``, ``gvas_v_bases``, ``cpu_block_lens``,
``_get_offload_layer_id``) and do not change after construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rd2h.errors import ConfigError, StateError
from rd2h.offload.budget import check_dram
from rd2h.offload.config import SparseOffloadConfig
from rd2h.offload.copier import HostCopier, RowCopier, RowMemory
from rd2h.offload.counters import OffloadCounters
from rd2h.offload.kernel import load_kernel
from rd2h.offload.pool import LayerSpan, PoolAllocator, PoolLayout
from rd2h.offload.residency import Geometry, Plan, Question, ResidencyTable, Workspace


@dataclass(frozen=True, slots=True)
class OffloadLayer:
    """A layer whose main KV lives in the pool; widths in elements of a token."""

    name: str
    kv_lora_rank: int
    rope_dim: int


@dataclass(slots=True)
class _Layer:
    """Memory of one layer, and what its hot buffer holds."""

    k_pool: RowMemory
    v_pool: RowMemory
    k_hot: torch.Tensor
    v_hot: torch.Tensor
    hot: tuple[RowMemory, RowMemory]
    table: ResidencyTable | None = None
    question: Question | None = None
    plan: Plan | None = None
    serial: int = 0
    """Selections of this layer so far, or the last one taken over from ``follows``."""
    follows: str | None = None
    """Layer whose selections this hot buffer holds; None: its own."""

    @property
    def pairs(self) -> tuple[tuple[RowMemory, RowMemory], ...]:
        """(hot, pool) for K and V."""
        return ((self.hot[0], self.k_pool), (self.hot[1], self.v_pool))


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
        self.config, self.dtype, self.num_blocks, self.block_size = config, dtype, num_blocks, block_size
        self.max_rows, self.tp_rank, self.tp_size = max_rows, tp_rank, tp_size
        self._geometry = Geometry(max_rows, config.topk_buffer_size, index_topk, block_size, num_blocks)
        self._barrier, self._device, self._kernel = barrier, device, load_kernel()
        self._copier = copier if copier is not None else HostCopier(self._kernel)
        self._workspace = Workspace(self._geometry)
        self._counters, self._taken = OffloadCounters(), OffloadCounters()
        self._closed = False

        token_bytes = [(layer.kv_lora_rank * dtype.itemsize, layer.rope_dim * dtype.itemsize) for layer in layers]
        layout = PoolLayout.plan([(k * block_size, v * block_size) for k, v in token_bytes], num_blocks)
        check_dram(config, layout.num_bytes)
        self._pool = allocator.allocate(layout.num_bytes)
        if tp_size > 1:
            barrier()

        self.offload_layer_names = [layer.name for layer in layers]
        self.gvas_k_bases = [self._pool.base + span.k_offset for span in layout.spans]
        self.gvas_v_bases = [self._pool.base + span.v_offset for span in layout.spans]
        self.cpu_block_lens = [(span.k_block_bytes, span.v_block_bytes) for span in layout.spans]
        self.k_caches_cpu: list[torch.Tensor] = []
        self.v_caches_cpu: list[torch.Tensor] = []
        self._ids = {name: index for index, name in enumerate(self.offload_layer_names)}
        self._layers = {
            layer.name: self._make_layer(layer, span) for layer, span in zip(layers, layout.spans, strict=True)
        }
        self._hot_bytes = sum(
            memory.num_rows * memory.row_bytes for made in self._layers.values() for memory in made.hot
        )
        if tp_rank == 0:
            for layer, span in zip(layers, layout.spans, strict=True):
                self.k_caches_cpu.append(self._pool_tensor(span.k_offset, layer.kv_lora_rank))
                self.v_caches_cpu.append(self._pool_tensor(span.v_offset, layer.rope_dim))
        if register:
            _current.append(self)

    def _make_layer(self, layer: OffloadLayer, span: LayerSpan) -> _Layer:
        rows, capacity, itemsize = self.max_rows, self.config.topk_buffer_size, self.dtype.itemsize
        split = rows * capacity * layer.kv_lora_rank
        # One allocation, K then V. Zeros, so that a slot that attention masks out never holds a NaN.
        both = torch.zeros(split + rows * capacity * layer.rope_dim, dtype=self.dtype, device=self._device)
        k_hot = both[:split].view(rows, capacity, layer.kv_lora_rank)
        v_hot = both[split:].view(rows, capacity, layer.rope_dim)
        return _Layer(
            self._pool_rows(span.k_offset, layer.kv_lora_rank * itemsize),
            self._pool_rows(span.v_offset, layer.rope_dim * itemsize),
            k_hot,
            v_hot,
            (_tensor_rows(k_hot), _tensor_rows(v_hot)),
        )

    def _pool_rows(self, offset: int, row_bytes: int) -> RowMemory:
        num_rows, array = self.num_blocks * self.block_size, self._pool.array
        if array is None:
            return RowMemory(self._pool.base + offset, num_rows, row_bytes)
        return RowMemory.over(array[offset : offset + num_rows * row_bytes], row_bytes)

    def _pool_tensor(self, offset: int, width: int) -> torch.Tensor:
        shape = (self.num_blocks, self.block_size, 1, width)
        array = self._pool.array
        if array is None:
            raise StateError("the allocator gave rank 0 memory that its processor cannot reach")
        num_bytes = self.num_blocks * self.block_size * width * self.dtype.itemsize
        return torch.from_numpy(array[offset : offset + num_bytes]).view(self.dtype).view(shape)

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
        slots = _integers(slot_mapping, np.int64)
        k_rows, v_rows = (
            self._new_rows(k_new, layer.k_pool, len(slots)),
            self._new_rows(v_new, layer.v_pool, len(slots)),
        )
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
        block out of range, TransferError when the copy failed; after an error nothing counts as resident.
        """
        layer = self._layer(layer_name)
        self._meet()
        question = Question(
            _integers(topk, np.int64),
            _integers(request_keys, np.uint64),
            _integers(stable_prefix, np.int64),
            _integers(block_tables, np.int32),
        )
        if layer.table is None:
            layer.table = ResidencyTable(self._geometry, self._workspace, self._kernel)
        layer.question, layer.plan, layer.follows = question, None, None
        plan = layer.table.plan(question)
        self._fetch(layer, layer.table, plan.targets, plan.sources)
        layer.plan, layer.serial = plan, layer.serial + 1
        self._counters.note_plan(plan)
        return torch.from_numpy(plan.slots)

    def reuse(self, layer_name: str, source_layer_name: str) -> torch.Tensor:
        """As ``gather``, with the selection that ``source_layer_name`` gathered in this step.

        A layer that follows in every step copies the source's misses from its own pool. One that has skipped a step
        copies the whole selection, and the source starts over at its next ``gather``, so that both stay equal.
        """
        layer, source = self._layer(layer_name), self._layer(source_layer_name)
        if source.plan is None or source.table is None or source.question is None or layer is source:
            raise StateError(f"{layer_name!r} cannot reuse the selection of {source_layer_name!r}: there is none")
        self._meet()
        following = layer.follows == source_layer_name or (layer.follows is None and layer.serial == 0)
        if layer.table is not None:
            layer.table.clear()
        if following and layer.serial == source.serial:
            return torch.from_numpy(source.plan.slots)
        if following and layer.serial == source.serial - 1:
            targets, sources = source.plan.targets, source.plan.sources
        else:
            targets, sources = source.table.whole_selection(source.question, source.plan)
            source.table.clear()
            self._counters.resyncs += 1
        layer.follows, layer.plan = source_layer_name, None
        self._fetch(layer, source.table, targets, sources)
        layer.serial = source.serial
        return torch.from_numpy(source.plan.slots)

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

    def _layer(self, name: str) -> _Layer:
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

    def _fetch(
        self,
        layer: _Layer,
        table: ResidencyTable,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
    ) -> None:
        started, moved = perf_counter(), None
        try:
            moved = self._copier.copy(layer.pairs, targets, sources)
        finally:
            if moved is None:
                table.clear()
        self._counters.note_fetch(moved, perf_counter() - started)

    def _new_rows(self, rows: Any, pool: RowMemory, count: int) -> RowMemory:
        if rows.dtype != self.dtype or rows.ndim != 2 or len(rows) < count:
            raise StateError(f"new rows are {rows.dtype} {tuple(rows.shape)}, expected {self.dtype} for {count} slots")
        if rows.shape[1] * self.dtype.itemsize != pool.row_bytes:
            raise StateError(f"new rows are {rows.shape[1]} wide, the pool's {pool.row_bytes // self.dtype.itemsize}")
        return _tensor_rows(rows.detach().contiguous())


def _tensor_rows(tensor: torch.Tensor) -> RowMemory:
    row_bytes = tensor.shape[-1] * tensor.element_size()
    num_rows = tensor.numel() // tensor.shape[-1]
    if tensor.device.type != "cpu":
        return RowMemory(tensor.data_ptr(), num_rows, row_bytes)
    return RowMemory.over(tensor.view(-1).view(torch.uint8).numpy(), row_bytes)


def _integers(values: Any, dtype: type[Any]) -> npt.NDArray[Any]:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if dtype is np.uint64 and array.dtype == np.int64:
        return array.view(np.uint64)
    return array if array.dtype == dtype else array.astype(dtype)


_current: list[SparseKVOffloadManager] = []


def current_manager() -> SparseKVOffloadManager | None:
    """The process's manager, or None."""
    return _current[0] if _current else None


def get_sparse_kv_offload_manager() -> SparseKVOffloadManager:
    """The process's manager. Raises StateError when there is none (yet)."""
    if not _current:
        raise StateError("this process has no sparse offload manager")
    return _current[0]
