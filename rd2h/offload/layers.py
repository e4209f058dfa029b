"""Memory of the offloaded layers: their part of the pool, and their hot buffers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rd2h.errors import StateError
from rd2h.offload.copier import RowMemory
from rd2h.offload.pool import LayerSpan, PoolMemory


@dataclass(frozen=True, slots=True)
class OffloadLayer:
    """A layer whose main KV lives in the pool; widths in elements of a token."""

    name: str
    kv_lora_rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What all layers have in common."""

    num_blocks: int
    block_size: int
    rows: int
    capacity: int
    dtype: torch.dtype
    device: str

    @property
    def pool_rows(self) -> int:
        """Tokens of the pool."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """K and V of one layer in the pool and in the hot buffer."""

    k_pool: RowMemory
    v_pool: RowMemory
    k_hot: torch.Tensor
    v_hot: torch.Tensor
    k_hot_rows: RowMemory
    v_hot_rows: RowMemory

    @classmethod
    def make(cls, layer: OffloadLayer, span: LayerSpan, pool: PoolMemory, shape: Shape) -> "LayerMemory":
        """Hot buffers [rows, capacity, width] in one allocation, K then V.

        They begin as zeros, so that a slot that attention masks out never holds a NaN.
        """
        split = shape.rows * shape.capacity * layer.kv_lora_rank
        elements = split + shape.rows * shape.capacity * layer.rope_dim
        both = torch.zeros(elements, dtype=shape.dtype, device=shape.device)
        k_hot = both[:split].view(shape.rows, shape.capacity, layer.kv_lora_rank)
        v_hot = both[split:].view(shape.rows, shape.capacity, layer.rope_dim)
        return cls(
            _pool_rows(pool, span.k_offset, layer.kv_lora_rank, shape),
            _pool_rows(pool, span.v_offset, layer.rope_dim, shape),
            k_hot,
            v_hot,
            tensor_rows(k_hot),
            tensor_rows(v_hot),
        )

    @property
    def pairs(self) -> tuple[tuple[RowMemory, RowMemory], ...]:
        """(hot, pool) for K and V."""
        return ((self.k_hot_rows, self.k_pool), (self.v_hot_rows, self.v_pool))

    @property
    def hot_bytes(self) -> int:
        """Device bytes of the hot buffers."""
        return sum(memory.num_rows * memory.row_bytes for memory, _ in self.pairs)

    def new_rows(self, k_new: Any, v_new: Any, count: int) -> tuple[RowMemory, RowMemory]:
        """The step's new rows, checked against the pool's. Raises StateError."""
        return self._new(k_new, self.k_hot, count), self._new(v_new, self.v_hot, count)

    @staticmethod
    def _new(rows: Any, hot: torch.Tensor, count: int) -> RowMemory:
        if rows.dtype != hot.dtype or rows.ndim != 2 or len(rows) < count:
            raise StateError(f"new rows are {rows.dtype} {tuple(rows.shape)}, expected {hot.dtype} for {count} slots")
        if rows.shape[1] != hot.shape[2]:
            raise StateError(f"new rows are {rows.shape[1]} wide, the pool's {hot.shape[2]}")
        return tensor_rows(rows.detach().contiguous())


def pool_tensor(pool: PoolMemory, offset: int, width: int, shape: Shape) -> torch.Tensor:
    """[num_blocks, block_size, 1, width] over the pool. Raises StateError where the processor cannot reach it."""
    if pool.array is None:
        raise StateError("the allocator gave rank 0 memory that its processor cannot reach")
    num_bytes = shape.pool_rows * width * shape.dtype.itemsize
    flat = torch.from_numpy(pool.array[offset : offset + num_bytes]).view(shape.dtype)
    return flat.view(shape.num_blocks, shape.block_size, 1, width)


def tensor_rows(tensor: torch.Tensor) -> RowMemory:
    """A contiguous tensor as rows of its last dimension."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    num_rows = tensor.numel() // tensor.shape[-1]
    if tensor.device.type != "cpu":
        return RowMemory(tensor.data_ptr(), num_rows, row_bytes)
    return RowMemory.over(tensor.view(-1).view(torch.uint8).numpy(), row_bytes)


def integers(values: Any, dtype: type[Any]) -> npt.NDArray[Any]:
    """A tensor or array as a NumPy array of ``dtype``; int64 where uint64 is wanted keeps its bits."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if dtype is np.uint64 and array.dtype == np.int64:
        return array.view(np.uint64)
    return array if array.dtype == dtype else array.astype(dtype)


def _pool_rows(pool: PoolMemory, offset: int, width: int, shape: Shape) -> RowMemory:
    row_bytes = width * shape.dtype.itemsize
    if pool.array is None:
        return RowMemory(pool.base + offset, shape.pool_rows, row_bytes)
    return RowMemory.over(pool.array[offset : offset + shape.pool_rows * row_bytes], row_bytes)
