"""The compiled functions of residency planning as Python calls; ``rd2h.offload.kernel`` builds and loads them."""

import ctypes

import numpy as np
import numpy.typing as npt


class Lookup(ctypes.Structure):
    """The arguments of ``rd2h_plan``, field by field as in the C source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "width", "capacity")),
        *((name, ctypes.c_void_p) for name in ("topk", "keys", "prefix", "block_tables")),
        *((name, ctypes.c_int64) for name in ("max_blocks", "block_size", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("entries", "last_keys", "last_prefix")),
        *((name, ctypes.c_void_p) for name in ("wanted", "slot_of", "scratch")),
        *((name, ctypes.c_void_p) for name in ("out_slots", "out_sources", "out_targets", "out_counts")),
    )


class Kernel:
    """The compiled functions. Calls release the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._plan = library.rd2h_plan
        self._plan.argtypes = (ctypes.POINTER(Lookup),)
        self._plan.restype = ctypes.c_int
        self._copy = library.rd2h_copy_rows
        self._copy.argtypes = (*(ctypes.c_void_p for _ in range(4)), ctypes.c_int64, ctypes.c_int64)
        self._copy.restype = None

    def plan(self, lookup: Lookup) -> int:
        """Plans all rows; 0, or the kind of fault."""
        status: int = self._plan(ctypes.byref(lookup))
        return status

    def copy_rows(
        self,
        target: npt.NDArray[np.uint8],
        source: npt.NDArray[np.uint8],
        target_rows: npt.NDArray[np.int64],
        source_rows: npt.NDArray[np.int64],
    ) -> None:
        """``target[target_rows] = source[source_rows]`` for contiguous byte rows; the caller has checked the bounds."""
        self._copy(
            target.ctypes.data,
            source.ctypes.data,
            target_rows.ctypes.data,
            source_rows.ctypes.data,
            len(target_rows),
            target.shape[1],
        )
