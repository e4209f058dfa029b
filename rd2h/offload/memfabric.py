"""Host pool and row copies of MemFabric (``memfabric_hybrid.offload``), for NPUs; the wheel is imported when asked for.

Not run on an NPU by this project; ``docs/offload.md`` lists what is therefore unproved.
"""

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rd2h.errors import EngineError, TransferError
from rd2h.offload.copier import RowMemory, check_rows
from rd2h.offload.pool import ALIGNMENT_BYTES, GIB, aligned, available_memory_bytes, check_machine

MODULE = "memfabric_hybrid"


def load_offload() -> Any:
    """The wheel's ``offload`` module. Raises EngineError in one line when it cannot be imported."""
    try:
        return importlib.import_module(MODULE).offload
    except (ImportError, OSError, AttributeError) as error:
        raise EngineError(f"{MODULE}.offload cannot be imported: {error}") from error


class MemfabricPool:
    """Memory that rank 0 backs and that all ranks reach at the same address; see ``rd2h.offload.pool.PoolMemory``."""

    def __init__(self, offload: Any, base: int, num_bytes: int, pointer: int | None) -> None:
        self._offload, self._pointer = offload, pointer
        self.base, self.num_bytes = base, num_bytes
        self.array: npt.NDArray[np.uint8] | None = None
        if pointer is not None:
            view = (ctypes.c_uint8 * num_bytes).from_address(base)
            self.array = np.frombuffer(memoryview(view), np.uint8)
        self.closed = False

    def touched_bytes(self) -> int:
        """All of it on rank 0: MemFabric pins what it allocates."""
        return self.num_bytes if self._pointer is not None and not self.closed else 0

    def close(self) -> None:
        """Free and leave MemFabric; views over the memory must be gone."""
        if self.closed:
            return
        self.closed, self.array = True, None
        if self._pointer is not None:
            self._offload.free(self._pointer)
        self._offload.uninitialize()


@dataclass(frozen=True, slots=True)
class MemfabricPoolAllocator:
    """``broadcast`` returns rank 0's value on every TP rank; all ranks call it in the same order."""

    tp_rank: int
    tp_size: int
    device_id: int
    broadcast: Callable[[Any], Any]
    store_url: str | None = None
    """Config store of the pool; None: MemFabric's own choice (environment, or a port derived from the device)."""
    offload: Any = None
    """The wheel's module; None: import it."""
    available_bytes: Callable[[], int] = available_memory_bytes

    def allocate(self, num_bytes: int) -> MemfabricPool:
        """One allocation for all layers, on rank 0. Raises ConfigError, EngineError; if rank 0 fails, all do."""
        offload = self.offload if self.offload is not None else load_offload()
        # One chunk more, because the address need not be aligned.
        reserve = -(-(num_bytes + ALIGNMENT_BYTES) // GIB) * GIB
        # Before initialize, in which the ranks wait for one another.
        self._check_together(reserve)
        code = offload.initialize(self._config(offload, reserve))
        first, size = self.tp_rank == 0, num_bytes + ALIGNMENT_BYTES
        pointer = int(offload.malloc(size)) if first and not code else 0
        # Also of a rank that has failed: the others take part in this.
        base = self.broadcast(aligned(pointer) if first else None)
        if code:
            raise EngineError(
                f"memfabric offload.initialize failed, ret={code} (rank {self.tp_rank} of {self.tp_size}, device "
                f"{self.device_id}, {reserve} bytes)"
            )
        if base == 0:
            offload.uninitialize()
            raise EngineError(
                f"memfabric offload.malloc({size}) gave no memory"
                if first
                else "rank 0 could not allocate the host pool"
            )
        return MemfabricPool(offload, base, num_bytes, pointer if first else None)

    def _check_together(self, reserve: int) -> None:
        if self.tp_rank != 0:
            refusal = self.broadcast(None)
            if refusal:
                raise EngineError(f"rank 0 could not make the host pool: {refusal}")
            return
        try:
            check_machine(reserve, self.available_bytes())
        except Exception as error:
            self.broadcast(str(error))
            raise
        self.broadcast("")

    def _config(self, offload: Any, reserve: int) -> Any:
        config = offload.OffloadConfig()
        config.device_id = self.device_id
        config.reserve_size = reserve
        config.alloc_size = reserve if self.tp_rank == 0 else 0
        config.world_size = self.tp_size
        config.rank_id = self.tp_rank
        config.scene = offload.Scene.SHARED
        if self.store_url is not None:
            config.store_url = self.store_url
        return config


class SparseCopier:
    """``offload.sparse_copy`` over descriptors on the device: K rows, then V rows, in one call a pair list."""

    def __init__(self, device: Any, max_rows: int, offload: Any = None) -> None:
        """``device``: a ``torch.device`` with an index. ``max_rows``: most rows of one copy."""
        import torch

        self._offload = offload if offload is not None else load_offload()
        self._device, self._torch, self._bound = device, torch, max_rows

    def copy(
        self,
        pairs: Sequence[tuple[RowMemory, RowMemory]],
        target_rows: npt.NDArray[np.int64],
        source_rows: npt.NDArray[np.int64],
    ) -> int:
        """See ``RowCopier``. The copy is ordered by the device's stream, so a kernel after it sees the bytes."""
        check_rows(pairs, target_rows, source_rows)
        if len(target_rows) > self._bound:
            raise TransferError(f"a copy of {len(target_rows)} rows exceeds the bound of {self._bound}")
        if not len(target_rows):
            return 0
        sources = np.concatenate([source.base + source_rows * source.row_bytes for _, source in pairs])
        targets = np.concatenate([target.base + target_rows * target.row_bytes for target, _ in pairs])
        lengths = np.repeat(np.array([target.row_bytes for target, _ in pairs], np.int32), len(target_rows))
        count = np.array([len(sources)], np.int32)
        tensors = [self._torch.from_numpy(array).to(self._device) for array in (sources, targets, lengths, count)]
        code = self._offload.sparse_copy(*tensors, self._device)
        if code:
            raise TransferError(f"memfabric offload.sparse_copy failed, ret={code}, {len(sources)} rows", code=code)
        return int(lengths.sum(dtype=np.int64))
