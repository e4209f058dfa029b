"""What a transfer engine is: the contract that the connector programs against, and its small value types.

An engine moves bytes from a Prefill process into the memory of a Decode process. Decode always pulls: it names the
peer's session, and three parallel arrays of local addresses, peer addresses and lengths in bytes. Nothing here imports
torch or vLLM, and engines import their native libraries only in `initialize`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rd2h.errors import EngineError

ADDRESS_LIMIT = 1 << 64
"""One past the highest address; all address arithmetic is done in 64 bits."""

AddressArray = NDArray[np.uint64]
_UINT64 = np.dtype(np.uint64)


class EngineRole(enum.Enum):
    """Which side of a transfer this process is. Decides who may publish a session and who may read."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, order=True)
class MemoryRegion:
    """A registered range of memory: `length` bytes from address `addr`. Not empty, inside the 64-bit address space."""

    addr: int
    length: int

    def __post_init__(self) -> None:
        if not 0 < self.addr < ADDRESS_LIMIT:
            raise EngineError(f"memory region addr={self.addr} is out of range; expected 1..2^64-1")
        if not 0 < self.length <= ADDRESS_LIMIT - self.addr:
            raise EngineError(
                f"memory region length={self.length} at addr={self.addr:#x} is out of range; expected at least 1 byte "
                "and an end inside the 64-bit address space"
            )

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.addr + self.length

    def contains(self, other: MemoryRegion) -> bool:
        """True when every byte of `other` lies in this region."""
        return self.addr <= other.addr and other.end <= self.end

    def overlaps(self, other: MemoryRegion) -> bool:
        """True when at least one byte lies in both regions."""
        return self.addr < other.end and other.addr < self.end


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Outcome of one batched read: `code` 0 on success, else the engine's error code with a text fit for the peer."""

    code: int
    message: str = ""

    @property
    def ok(self) -> bool:
        """True when every byte of every descriptor has arrived."""
        return self.code == 0


READ_OK = ReadResult(0)


class ReadCode(enum.IntEnum):
    """Result codes that are ours. Smaller positive codes are errno values; negative ones come from a native engine."""

    SESSION_REFUSED = 1001
    """The session string is malformed or names a process or endpoint that may not be read."""
    SESSION_LOST = 1002
    """The peer that opened the session is gone or was replaced, or has closed its engine."""
    ENGINE_CLOSED = 1003
    """This engine is not ready: not initialised, failed, or closed."""
    NO_PROGRESS = 1004
    """The kernel moved no byte and gave no reason, several times."""
    NATIVE_EXCEPTION = 1005
    """The native library raised instead of returning a code."""


class TransferEngine(Protocol):
    """One engine per process and role. All methods are thread-safe; `initialize` comes first, `close` last.

    A destination whose read returned a non-zero result may hold any mixture of old and new bytes.
    """

    @property
    def backend(self) -> str:
        """The name under which `create_engine` knows this engine, e.g. "host"."""
        ...

    def initialize(self, role: EngineRole) -> None:
        """Bring the engine up for one role. Raises EngineError; a failed engine can only be closed."""
        ...

    def session(self) -> str:
        """What a Prefill publishes so that a Decode can read from it. Raises StateError before `initialize`."""
        ...

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Register regions for transfer; overlapping ones are merged first. Raises EngineError naming the region."""
        ...

    def open_session(self, session: str) -> None:
        """Validate a peer's session string and connect to it. Cached. Raises SessionError with a clear text."""
        ...

    def batch_transfer_sync_read(
        self, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> ReadResult:
        """Copy `lengths[i]` bytes from the peer's address `peer[i]` to our address `local[i]`, for all i.

        Returns after the last byte has arrived or the read has failed; the GIL is free while bytes move. A fault of the
        peer is a result, never an exception. Arrays of different shape or type are an EngineError (a defect in the
        caller).
        """
        ...

    def get_rpc_port(self) -> int:
        """The port that the engine listens on; 0 for engines that listen on none."""
        ...

    def close(self) -> None:
        """Wait for running reads (bounded), make the published session useless, free everything. Idempotent."""
        ...


def merge_regions(regions: Iterable[MemoryRegion], *, join_adjacent: bool = False) -> tuple[MemoryRegion, ...]:
    """Sort regions and merge those that overlap, so that no byte is registered twice.

    Regions that merely touch stay apart unless `join_adjacent`: two device allocations may lie side by side without
    being one registrable piece of memory. Pass True only for views known to lie in one storage.
    """
    merged: list[MemoryRegion] = []
    for region in sorted(regions):
        last = merged[-1] if merged else None
        if last is not None and (region.addr < last.end or (join_adjacent and region.addr == last.end)):
            merged[-1] = MemoryRegion(last.addr, max(last.end, region.end) - last.addr)
        else:
            merged.append(region)
    return tuple(merged)


def check_descriptors(local: AddressArray, peer: AddressArray, lengths: AddressArray) -> int:
    """Return the number of descriptors, or raise EngineError when the three arrays do not fit together."""
    if local.dtype is peer.dtype is lengths.dtype is _UINT64 and local.shape == peer.shape == lengths.shape:
        shape = local.shape
        if len(shape) == 1:
            return int(shape[0])
    for name, array in (("local", local), ("peer", peer), ("lengths", lengths)):
        if array.dtype != np.uint64 or array.ndim != 1:
            raise EngineError(
                f"descriptor array {name} has dtype {array.dtype} and {array.ndim} dimensions; expected uint64 and 1"
            )
    if not local.size == peer.size == lengths.size:
        raise EngineError(
            f"descriptor arrays differ in size: local {local.size}, peer {peer.size}, lengths {lengths.size}"
        )
    return local.size
