"""Copies of single token rows between the host pool and the hot buffer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rd2h.errors import StateError
from rd2h.offload.compiled import Kernel


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Memory seen as rows of equal length: row i begins at ``base + i * row_bytes``."""

    base: int
    num_rows: int
    row_bytes: int
    array: npt.NDArray[np.uint8] | None = None
    """[num_rows, row_bytes], contiguous, where the processor can reach it."""

    @classmethod
    def over(cls, array: npt.NDArray[np.uint8], row_bytes: int) -> "RowMemory":
        """Rows over contiguous bytes."""
        rows = array.reshape(-1, row_bytes)
        return cls(rows.ctypes.data, len(rows), row_bytes, rows)


class RowCopier(Protocol):
    """Moves rows; when ``copy`` has returned the bytes are there, or an error was raised."""

    def copy(
        self,
        pairs: Sequence[tuple[RowMemory, RowMemory]],
        target_rows: npt.NDArray[np.int64],
        source_rows: npt.NDArray[np.int64],
    ) -> int:
        """For every (target, source) pair: target row ``target_rows[i]`` becomes source row ``source_rows[i]``.

        Returns the bytes moved. Raises StateError for a row outside its memory (nothing is moved then), TransferError
        when the move failed.
        """
        ...


class HostCopier:
    """Both sides are this machine's memory."""

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel

    def copy(
        self,
        pairs: Sequence[tuple[RowMemory, RowMemory]],
        target_rows: npt.NDArray[np.int64],
        source_rows: npt.NDArray[np.int64],
    ) -> int:
        """See ``RowCopier``."""
        check_rows(pairs, target_rows, source_rows)
        for target, source in pairs:
            if target.array is None or source.array is None:
                raise StateError("the host copier was given memory that this processor cannot reach")
            if self._kernel is not None:
                self._kernel.copy_rows(target.array, source.array, target_rows, source_rows)
            else:
                target.array[target_rows] = source.array[source_rows]
        return len(target_rows) * sum(target.row_bytes for target, _ in pairs)


def check_rows(
    pairs: Sequence[tuple[RowMemory, RowMemory]],
    target_rows: npt.NDArray[np.int64],
    source_rows: npt.NDArray[np.int64],
) -> None:
    """Raises StateError unless every row lies inside its memory and row lengths agree."""
    if len(target_rows) != len(source_rows):
        raise StateError(f"{len(target_rows)} target rows for {len(source_rows)} source rows")
    for target, source in pairs:
        if target.row_bytes != source.row_bytes:
            raise StateError(f"rows of {source.row_bytes} bytes do not fit into rows of {target.row_bytes} bytes")
        for what, rows, memory in (("target", target_rows, target), ("source", source_rows, source)):
            if len(rows) and not (rows.min() >= 0 and rows.max() < memory.num_rows):
                raise StateError(f"{what} rows {rows.min()}..{rows.max()} exceed the {memory.num_rows} rows there are")
