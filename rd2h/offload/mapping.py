"""Shared memory at the same address in several processes: an anonymous file, mapped where the owner says.

The file has no name (memfd), so nothing can be left behind: memory goes when the last process that maps it is gone,
however it ended. Pages are given by the kernel at the first touch, so a large reservation costs nothing.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import weakref

import numpy as np
import numpy.typing as npt

from rd2h.errors import EngineError

MAP_FIXED_NOREPLACE, MAP_NORESERVE = 0x100000, 0x4000
F_ADD_SEALS = 1033
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1, 2, 4
MADV_REMOVE = 9
ADDRESS_LOW, ADDRESS_HIGH = 0x1000_0000_0000, 0x5000_0000_0000
"""Range that a 47-bit address space leaves alone: above heaps of fixed programs, below libraries and stacks."""
ADDRESS_TRIES = 16
GIANT_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class AddressTakenError(EngineError):
    """Something else lies at the wanted address in this process."""


def create_file(name: str, num_bytes: int) -> int:
    """Descriptor of a new anonymous file of ``num_bytes``, sealed against a change of its size. Raises EngineError."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise EngineError(f"cannot create shared memory: {error}") from error
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SEAL_SEAL | SEAL_SHRINK | SEAL_GROW)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(f"cannot reserve {num_bytes} bytes of shared memory: {error}") from error
    return descriptor


def open_file(pid: int, descriptor: int, identity: tuple[int, int], num_bytes: int) -> int:
    """Descriptor of the file that process ``pid`` holds open, if it is the right one. Raises EngineError."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(
            f"cannot open the host pool of rank 0 ({path}): {error}; TP ranks must share user and PID namespace"
        ) from error
    size = os.fstat(opened).st_size
    if file_identity(opened) != identity or size != num_bytes:
        os.close(opened)
        raise EngineError(
            f"{path} is not the host pool of rank 0: {size} bytes, expected {num_bytes} of file {identity}"
        )
    return opened


def file_identity(descriptor: int) -> tuple[int, int]:
    """(device, inode)."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def touched_bytes(descriptor: int) -> int:
    """Bytes of the file that memory has been given for."""
    return os.fstat(descriptor).st_blocks * 512


class SharedMapping:
    """A file mapped at ``address``; it stays mapped as long as an array over it lives."""

    def __init__(self, descriptor: int, num_bytes: int, address: int) -> None:
        self.address, self.num_bytes = address, num_bytes
        _map(descriptor, num_bytes, address)
        holder = (ctypes.c_uint8 * num_bytes).from_address(address)
        self._finalizer = weakref.finalize(holder, _libc.munmap, address, num_bytes)
        # Unmapping under a thread that still runs at exit would crash it; the kernel does it in a moment anyway.
        self._finalizer.atexit = False
        self.bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memoryview(holder), np.uint8)

    @classmethod
    def anywhere(cls, descriptor: int, num_bytes: int) -> "SharedMapping":
        """A mapping at an address that is very likely free in other processes too. Raises EngineError."""
        for _ in range(ADDRESS_TRIES):
            address = ADDRESS_LOW + secrets.randbelow(ADDRESS_HIGH - ADDRESS_LOW) // GIANT_BYTES * GIANT_BYTES
            try:
                return cls(descriptor, num_bytes, address)
            except AddressTakenError:
                continue
        raise EngineError(f"no free address for {num_bytes} bytes in {ADDRESS_TRIES} tries")

    def release(self) -> None:
        """Give the memory back now, for every process that maps the file. Late readers see zeros, they do not crash."""
        if self._finalizer.alive:
            _libc.madvise(self.address, self.num_bytes, MADV_REMOVE)
        self.bytes = None

    def forget(self) -> None:
        """This process no longer needs the mapping."""
        self.bytes = None


def _map(descriptor: int, num_bytes: int, address: int) -> None:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE
    got = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if got == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        if code in (errno.EEXIST, errno.ENOMEM, errno.EINVAL):
            raise AddressTakenError(f"cannot map {num_bytes} bytes at {address:#x}: {os.strerror(code)}")
        raise EngineError(f"cannot map {num_bytes} bytes: {os.strerror(code)}")
    if got != address:  # a kernel that does not know MAP_FIXED_NOREPLACE takes the address as a hint
        _libc.munmap(got, num_bytes)
        raise AddressTakenError(f"the kernel mapped {num_bytes} bytes elsewhere than at {address:#x}")
