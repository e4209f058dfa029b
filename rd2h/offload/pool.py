"""The host pool: one stretch of memory for main K and V of all layers, shared by the TP ranks of one engine.

Rank 0 owns it. Layer by layer it holds K, then V, each beginning at a multiple of 2 MiB. Block ``b`` of a layer's K
lies at ``k_base + b * k_block_bytes``; all bases are the same numbers on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rd2h.errors import ConfigError, EngineError
from rd2h.offload.mapping import SharedMapping, create_file, file_identity, open_file, touched_bytes

ALIGNMENT_BYTES = 2 << 20
GIB = 1 << 30
MACHINE_RESERVE_BYTES = 256 << 20
"""Memory that the pool leaves to everything else on the machine."""


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Where one layer's K and V lie in the pool; offsets in bytes from its beginning."""

    k_offset: int
    v_offset: int
    k_block_bytes: int
    v_block_bytes: int


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """All layers of a pool."""

    spans: tuple[LayerSpan, ...]
    num_bytes: int

    @classmethod
    def plan(cls, block_bytes: Sequence[tuple[int, int]], num_blocks: int) -> PoolLayout:
        """Layout for layers of (K, V) bytes a block. Raises ConfigError for sizes that are not positive.

        Equal layers lie at equal distances, K from K as V from V, so that copies planned for one layer can be shifted
        to the next.
        """
        if num_blocks < 1 or not block_bytes or min(min(pair) for pair in block_bytes) < 1:
            raise ConfigError(f"a host pool of {num_blocks} blocks for layers of {list(block_bytes)} bytes is empty")
        spans, offset = [], 0
        for k_bytes, v_bytes in block_bytes:
            v_offset = offset + aligned(k_bytes * num_blocks)
            spans.append(LayerSpan(offset, v_offset, k_bytes, v_bytes))
            offset = v_offset + aligned(v_bytes * num_blocks)
        return cls(tuple(spans), offset)


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class PoolMemory(Protocol):
    """Memory that an allocator gave. ``base`` is valid on this rank and equal on all ranks."""

    base: int
    num_bytes: int
    array: npt.NDArray[np.uint8] | None
    """The pool as bytes, where this rank's processor can reach it; None elsewhere."""

    def touched_bytes(self) -> int:
        """Bytes that have been given physical memory, as far as is known."""
        ...

    def close(self) -> None:
        """Give the memory back. May be called again."""
        ...


class PoolAllocator(Protocol):
    """Makes the shared memory of a pool; every TP rank calls ``allocate`` once, with the same size.

    The ranks meet afterwards, also where it failed: so no rank may be left waiting inside for one that has failed.
    """

    def allocate(self, num_bytes: int) -> PoolMemory:
        """Raises ConfigError when the machine has less, EngineError when it cannot be shared."""
        ...


class HostPool:
    """Shared memory of this machine; also the memory that ``HostPoolAllocator`` gives."""

    def __init__(self, mapping: SharedMapping, descriptor: int, owner: bool) -> None:
        self._mapping, self._descriptor, self._owner = mapping, descriptor, owner
        self.base, self.num_bytes = mapping.address, mapping.num_bytes
        self.array = mapping.bytes
        self.closed = False

    def touched_bytes(self) -> int:
        """Bytes that have been given physical memory, by whichever rank."""
        return 0 if self.closed else touched_bytes(self._descriptor)

    def close(self) -> None:
        """Rank 0 gives the memory back at once, whoever still maps it; other ranks only let go of it."""
        if self.closed:
            return
        self.closed, self.array = True, None
        os.close(self._descriptor)
        if self._owner:
            self._mapping.release()
        else:
            self._mapping.forget()


@dataclass(frozen=True, slots=True)
class HostPoolAllocator:
    """Shares an anonymous file: rank 0 makes it, the others open it through ``/proc`` and map it at the same address.

    ``broadcast`` returns rank 0's value on every rank; all ranks call it in the same order. ``available_bytes`` tells
    what the machine can give (None: do not ask).
    """

    tp_rank: int = 0
    tp_size: int = 1
    broadcast: Callable[[Any], Any] = lambda value: value
    available_bytes: Callable[[], int] | None = None

    def allocate(self, num_bytes: int) -> HostPool:
        """See ``PoolAllocator``. If rank 0 fails, all do."""
        if self.tp_rank == 0:
            return self._create(num_bytes)
        offer = self.broadcast(None)
        if isinstance(offer, str):
            raise EngineError(f"rank 0 could not make the host pool: {offer}")
        pid, remote, identity, address = offer
        descriptor = open_file(pid, remote, tuple(identity), num_bytes)
        try:
            mapping = SharedMapping(descriptor, num_bytes, address)
        except EngineError:
            os.close(descriptor)
            raise
        return HostPool(mapping, descriptor, owner=False)

    def _create(self, num_bytes: int) -> HostPool:
        try:
            check_machine(num_bytes, (self.available_bytes or available_memory_bytes)())
            descriptor = create_file("rd2h-host-pool", num_bytes)
            try:
                mapping = SharedMapping.anywhere(descriptor, num_bytes)
            except EngineError:
                os.close(descriptor)
                raise
        except Exception as error:  # whatever it was, the others wait for word
            self.broadcast(str(error))
            raise
        self.broadcast((os.getpid(), descriptor, file_identity(descriptor), mapping.address))
        return HostPool(mapping, descriptor, owner=True)


def check_machine(needed_bytes: int, available_bytes: int) -> None:
    """Raises ConfigError with both numbers when the machine cannot hold the pool."""
    if needed_bytes + MACHINE_RESERVE_BYTES > available_bytes:
        raise ConfigError(
            f"the host pool needs {needed_bytes} bytes ({needed_bytes / GIB:.3f} GiB), this machine has "
            f"{available_bytes} bytes ({available_bytes / GIB:.3f} GiB) available; {MACHINE_RESERVE_BYTES} stay free",
            key="dram_size_per_dp_GB",
        )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping: what the machine has left, or less if a control group says so."""
    information = (root / "proc/meminfo").read_text(encoding="ascii")
    values = {name: text.split() for name, _, text in (line.partition(":") for line in information.splitlines())}
    available = int(values["MemAvailable"][0]) * 1024
    for limit, usage, evictable in _control_group_files(root):
        try:
            limit_text, usage_text = limit.read_text().strip(), usage.read_text().strip()
            evictable_bytes = _statistic(limit.with_name("memory.stat"), evictable)
        except OSError:
            continue
        if limit_text.isdecimal() and usage_text.isdecimal():
            available = min(available, max(0, int(limit_text) - max(0, int(usage_text) - evictable_bytes)))
    return available


def _statistic(path: Path, name: str) -> int:
    """A number of a control group's statistics; 0 where they cannot be read or have none of this name."""
    try:
        values = dict(line.partition(" ")[::2] for line in path.read_text().splitlines())
    except OSError:
        return 0
    return int(values.get(name, 0))


def _control_group_files(root: Path) -> list[tuple[Path, Path, str]]:
    """Files of limit and usage of this process's memory control groups, from its own up to the root; versions 2 and 1.

    With the name, among a group's statistics, of what its usage holds of files and gives up when memory is wanted: the
    machine's own number counts that as available too, and after a model has been loaded it is most of the usage.
    """
    names: Mapping[str, tuple[str, str, str]] = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            if controller not in names:
                continue
            folder = root / "sys/fs/cgroup" / controller
            group = folder / path.lstrip("/")
            for place in (group, *group.parents):
                limit, usage, evictable = names[controller]
                files.append((place / limit, place / usage, evictable))
                if place == folder:
                    break
    return files
