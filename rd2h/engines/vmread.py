"""Vectored reads from another process: process_vm_readv with proof of whom the bytes came from.

Every system call carries the peer's proof twice: in front of the data and behind it. One call reads from one address
space, held by the kernel for the whole call, so a right proof in front means that all bytes of the call came from the
process that published it, however far the call got. The proof behind tells that the source had not closed its engine
when the last byte was read.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

import numpy as np

from rd2h.engines.base import READ_OK, AddressArray, ReadCode, ReadResult
from rd2h.engines.proof import PROOF_BYTES, HostSession

IOV_MAX: Final = 1024
"""The kernel's bound of vectors in one call (UIO_MAXIOV)."""
DESCRIPTORS_PER_CALL: Final = IOV_MAX - 2
MAX_DESCRIPTOR_BYTES: Final = 1 << 46
"""Larger lengths are refused: no mapping is that long, and sums of a call stay far inside 64 bits."""
MAX_STALLS: Final = 8
"""How often in a row a call may be interrupted or move nothing before the read fails."""
YAMA_SCOPE_FILE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")

_IOVEC_BYTES = 16
_libc = ctypes.CDLL(None, use_errno=True)
# ctypes drops the GIL around a call through CDLL: other threads run while the kernel copies.
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_process_vm_readv.restype = ctypes.c_ssize_t


def yama_scope() -> int | None:
    """Yama's ptrace_scope (0 off, 1 declared tracers, 2 administrators, 3 nobody); None without Yama."""
    try:
        return int(YAMA_SCOPE_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def explain_errno(code: int, session: HostSession, where: str) -> ReadResult:
    """The result for a failed call; `where` names what was being read."""
    pid = session.pid
    if code == errno.ESRCH:
        return ReadResult(ReadCode.SESSION_LOST, f"host read: source process {pid} is gone (ESRCH)")
    if code in (errno.EPERM, errno.EACCES):
        scope = yama_scope()
        yama = "Yama is not active" if scope is None else f"Yama ptrace_scope is {scope}"
        text = (
            f"host read: the kernel forbids reading process {pid} ({errno.errorcode[code]}); {yama}. "
            "Both processes must run as one user with the same capabilities, the source must be dumpable, "
            "ptrace_scope must be 0 or 1 (or this process have CAP_SYS_PTRACE), "
            "and no seccomp or security module may block process_vm_readv"
        )
    elif code == errno.EFAULT:
        text = f"host read: {where} is not mapped in the source process {pid} (EFAULT)"
    elif code == errno.ENOSYS:
        text = "host read: this kernel has no process_vm_readv (ENOSYS); it needs CONFIG_CROSS_MEMORY_ATTACH"
    elif code == errno.ENOMEM:
        text = "host read: the kernel has no memory for the vectors (ENOMEM)"
    else:
        text = f"host read: {where} failed with {errno.errorcode.get(code, code)} ({os.strerror(code)})"
    return ReadResult(code, text)


class VectorReader:
    """Vectors and proof buffers of one reading thread. Not thread-safe: one instance for each thread."""

    def __init__(self) -> None:
        self._local = np.zeros((IOV_MAX, 2), dtype=np.uint64)
        self._remote = np.zeros((IOV_MAX, 2), dtype=np.uint64)
        self._local_base = int(self._local.ctypes.data)
        self._remote_base = int(self._remote.ctypes.data)
        self._proofs = ctypes.create_string_buffer(2 * PROOF_BYTES)
        self._head_addr = ctypes.addressof(self._proofs)
        self._tail_addr = self._head_addr + PROOF_BYTES

    def read(self, source: HostSession, local: AddressArray, peer: AddressArray, lengths: AddressArray) -> ReadResult:
        """Read all descriptors from `source`; with none, only check the proof. Arrays: uint64, one size."""
        count = local.size
        if count and int(lengths.max()) > MAX_DESCRIPTOR_BYTES:
            index = int(lengths.argmax())
            return ReadResult(
                errno.EINVAL,
                f"host read: descriptor {index} of {count} has {int(lengths[index])} bytes; "
                f"at most {MAX_DESCRIPTOR_BYTES} are allowed",
            )
        first = 0
        while True:
            last = min(first + DESCRIPTORS_PER_CALL, count)
            result = self._read_batch(source, local[first:last], peer[first:last], lengths[first:last], first, count)
            if result.code or last == count:
                return result
            first = last

    def _read_batch(
        self,
        source: HostSession,
        local: AddressArray,
        peer: AddressArray,
        lengths: AddressArray,
        first: int,
        count: int,
    ) -> ReadResult:
        """Read at most DESCRIPTORS_PER_CALL descriptors, which are number `first` and following of `count`."""
        size = local.size
        rows = self._local[: size + 2]
        rows[1:-1, 0] = local
        rows[1:-1, 1] = lengths
        peer_rows = self._remote[: size + 2]
        peer_rows[1:-1, 0] = peer
        peer_rows[1:-1, 1] = lengths
        self._put_proof(source, 0, self._head_addr)
        self._put_proof(source, size + 1, self._tail_addr)
        total_bytes = int(lengths.sum())
        done = self._call(source.pid, 0, size + 2)
        if done == total_bytes + 2 * PROOF_BYTES:
            # The usual end: everything in one call.
            return READ_OK if self._proofs.raw == source.proof * 2 else _lost(source, "its proof has changed")
        return self._resume(source, local, peer, lengths, done, first, count)

    def _resume(
        self,
        source: HostSession,
        local: AddressArray,
        peer: AddressArray,
        lengths: AddressArray,
        done: int,
        first: int,
        count: int,
    ) -> ReadResult:
        """Go on after a call that ended early (`done` bytes with the proof, or -errno) until all is read or refused."""
        size = local.size
        ends = np.cumsum(lengths)
        read_bytes = 0
        row = 0
        stalls = 0
        while True:
            if done < 0 and -done not in (errno.EINTR, errno.EAGAIN):
                # Nothing was read, not even the proof in front.
                if -done == errno.EFAULT:
                    return _lost(source, "its proof page is gone")
                return explain_errno(-done, source, "the proof of the source")
            if 0 <= done < PROOF_BYTES or (done > 0 and self._proofs.raw[:PROOF_BYTES] != source.proof):
                return _lost(source, "its proof has changed")
            moved = max(done - PROOF_BYTES, 0)
            in_call = (int(ends[-1]) if size else 0) - read_bytes
            if moved >= in_call + PROOF_BYTES:
                return READ_OK if self._proofs.raw == source.proof * 2 else _lost(source, "its proof has changed")
            stalls = 0 if moved else stalls + 1
            read_bytes += min(moved, in_call)
            row = int(np.searchsorted(ends, read_bytes, side="right"))
            where = f"descriptor {first + row} of {count}"
            offset = read_bytes - (int(ends[row - 1]) if row else 0)
            if row < size:
                self._put_descriptor(
                    row + 1, int(local[row]) + offset, int(peer[row]) + offset, int(lengths[row]) - offset
                )
                where += f" (peer address {int(peer[row]):#x}, {int(lengths[row])} bytes)"
            else:
                where = "the proof behind the data"
            if not moved and done >= 0 and row < size:
                # The proof in front was read, so the kernel hid why the rest was not.
                refused = self._try_byte(source.pid, int(peer[row]) + offset)
                if refused < 0 and -refused not in (errno.EINTR, errno.EAGAIN):
                    return explain_errno(-refused, source, where)
                if refused >= 0 and stalls > 1:
                    return ReadResult(
                        errno.EFAULT, f"host read: the destination of {where} is not writable here (EFAULT)"
                    )
            if stalls > MAX_STALLS:
                return ReadResult(ReadCode.NO_PROGRESS, f"host read: no progress at {where} in {stalls} calls")
            self._put_proof(source, row, self._head_addr)
            done = self._call(source.pid, row, size + 2 - row)

    def _try_byte(self, pid: int, addr: int) -> int:
        """Read one byte of the source into our own buffer: tells a fault of the source from one of the destination."""
        local = np.array([[self._tail_addr, 1]], dtype=np.uint64)
        remote = np.array([[addr, 1]], dtype=np.uint64)
        done = int(_process_vm_readv(pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0))
        return done if done >= 0 else -ctypes.get_errno()

    def _put_proof(self, source: HostSession, row: int, buffer_addr: int) -> None:
        self._local[row] = (buffer_addr, PROOF_BYTES)
        self._remote[row] = (source.proof_addr, PROOF_BYTES)

    def _put_descriptor(self, row: int, local: int, peer: int, length: int) -> None:
        self._local[row] = (local, length)
        self._remote[row] = (peer, length)

    def _call(self, pid: int, row: int, rows: int) -> int:
        """One system call over `rows` vectors from `row`: the bytes read, or -errno."""
        offset = row * _IOVEC_BYTES
        done = int(_process_vm_readv(pid, self._local_base + offset, rows, self._remote_base + offset, rows, 0))
        return done if done >= 0 else -ctypes.get_errno()


def _lost(source: HostSession, why: str) -> ReadResult:
    return ReadResult(
        ReadCode.SESSION_LOST,
        f"host read: process {source.pid} is no longer the source that published this session ({why}); "
        "it was restarted, replaced, or has closed its engine",
    )
