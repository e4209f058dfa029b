"""Memory that a probe registers: ordinary memory, or device memory of an NPU."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rd2h.errors import EngineError
from rd2h.probing.pattern import chunks, pattern_bytes


class ProbeBuffer(Protocol):
    """A registrable range of `length` bytes at `addr`."""

    @property
    def addr(self) -> int:
        """First address."""
        ...

    @property
    def length(self) -> int:
        """Size in bytes."""
        ...

    def write(self, start: int, data: NDArray[np.uint8]) -> None:
        """Store bytes from offset `start`."""
        ...

    def read(self, start: int, length: int) -> NDArray[np.uint8]:
        """Bytes [start, start + length)."""
        ...


class CpuBuffer:
    """Anonymous pages of this process."""

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.length = length

    def write(self, start: int, data: NDArray[np.uint8]) -> None:
        """Store bytes from offset `start`."""
        self._bytes[start : start + data.size] = data

    def read(self, start: int, length: int) -> NDArray[np.uint8]:
        """A view of bytes [start, start + length)."""
        return self._bytes[start : start + length]


class NpuBuffer:
    """Device memory allocated through torch_npu."""

    def __init__(self, length: int, device_id: int) -> None:
        try:
            importlib.import_module("torch_npu")
            torch = importlib.import_module("torch")
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineError(f"--memory npu needs torch and torch_npu: {error}") from error
        self._torch: Any = torch
        try:
            self._tensor: Any = torch.empty(length, dtype=torch.uint8, device=f"npu:{device_id}")
        except RuntimeError as error:
            raise EngineError(f"cannot allocate {length} bytes on NPU {device_id}: {error}") from error
        self.addr = int(self._tensor.data_ptr())
        self.length = length

    def write(self, start: int, data: NDArray[np.uint8]) -> None:
        """Store bytes from offset `start`; returns when they are on the device."""
        self._tensor[start : start + data.size].copy_(self._torch.from_numpy(data))
        self._torch.npu.synchronize()

    def read(self, start: int, length: int) -> NDArray[np.uint8]:
        """A copy of bytes [start, start + length)."""
        copied: NDArray[np.uint8] = self._tensor[start : start + length].cpu().numpy()
        return copied


def allocate(memory: str, length: int, device_id: int) -> ProbeBuffer:
    """A buffer of the kind named by --memory ("cpu" or "npu")."""
    return CpuBuffer(length) if memory == "cpu" else NpuBuffer(length, device_id)


def fill_pattern(buffer: ProbeBuffer, seed: int) -> None:
    """Fill the whole buffer with the pattern of `seed`."""
    for start, size in chunks(buffer.length):
        buffer.write(start, pattern_bytes(seed, start, size))


def fill_byte(buffer: ProbeBuffer, value: int) -> None:
    """Fill the whole buffer with one byte."""
    for start, size in chunks(buffer.length):
        buffer.write(start, np.full(size, value, dtype=np.uint8))
