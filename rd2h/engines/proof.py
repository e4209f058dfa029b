"""Sessions of the host engine: how a Prefill process proves to be the one that published a session string.

Process ids are reused, and a restarted Prefill may get the id of the old one. So a session names the process id, the
process's start time, and a random nonce kept at an address in that process. The nonce page is wiped in forked children
(MADV_WIPEONFORK), vanishes on exec, and is wiped when the engine closes. Whoever reads the right nonce in the same
system call as the data has read from the process that published it. The magic in front of the nonce means that a
forged session can at worst name another live source of this package, never an arbitrary process with guessable bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from rd2h.engines.base import ADDRESS_LIMIT
from rd2h.errors import EngineError, SessionError, StateError

PROOF_MAGIC = b"rd2h-host-src/1\n"
NONCE_BYTES = 16
PROOF_BYTES = len(PROOF_MAGIC) + NONCE_BYTES
MAX_SESSION_CHARS = 192
MAX_PID = 1 << 22
"""The kernel's own upper bound of process ids (PID_MAX_LIMIT on 64-bit machines)."""

_MADV_WIPEONFORK = 18
_SESSION = re.compile(
    r"host:([0-9a-f]{32})\.(0|[1-9][0-9]{0,9}):([1-9][0-9]{0,6}):(0|[1-9][0-9]{0,19}):([1-9a-f][0-9a-f]{0,15}):([0-9a-f]{32})"
)


@dataclass(frozen=True, slots=True)
class HostSession:
    """The parsed form of `host:<machine>.<pid namespace>:<pid>:<start time>:<nonce address>:<nonce>`."""

    machine: str
    """32 hex digits: the kernel's boot id, new at every boot."""
    pid_namespace: int
    """Inode of the PID namespace in which `pid` counts."""
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot (field 22 of /proc/<pid>/stat)."""
    proof_addr: int
    """Address of magic and nonce in the source process."""
    nonce: bytes

    def __str__(self) -> str:
        who = f"{self.machine}.{self.pid_namespace}:{self.pid}:{self.start_ticks}"
        return f"host:{who}:{self.proof_addr:x}:{self.nonce.hex()}"

    @property
    def proof(self) -> bytes:
        """The bytes that must stand at `proof_addr`."""
        return PROOF_MAGIC + self.nonce

    @classmethod
    def parse(cls, text: str) -> HostSession:
        """Parse a session string from the network. Raises SessionError; quotes only a few characters of it."""
        if len(text) > MAX_SESSION_CHARS:
            raise SessionError(f"host session has {len(text)} characters; at most {MAX_SESSION_CHARS} are allowed")
        match = _SESSION.fullmatch(text)
        if match is None:
            raise SessionError(
                f"host session {text[:24]!r}... is malformed; expected "
                "host:<boot id>.<pid namespace>:<pid>:<start time>:<nonce address>:<nonce>"
            )
        machine, namespace, pid, ticks, addr, nonce = match.groups()
        session = cls(machine, int(namespace), int(pid), int(ticks), int(addr, 16), bytes.fromhex(nonce))
        if session.pid > MAX_PID:
            raise SessionError(f"host session names pid {session.pid}; the largest possible one is {MAX_PID}")
        if session.start_ticks >= ADDRESS_LIMIT:
            raise SessionError(f"host session start time {session.start_ticks} does not fit 64 bits")
        if session.proof_addr > ADDRESS_LIMIT - PROOF_BYTES:
            raise SessionError(f"host session nonce address {session.proof_addr:#x} ends beyond the address space")
        if not any(session.nonce):
            raise SessionError("host session nonce is all zero; that is what a closed source looks like")
        return session


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """What /proc tells about a process."""

    start_ticks: int
    uids: tuple[int, int, int]
    """Real, effective and saved user id."""
    zombie: bool


def process_identity(pid: int) -> ProcessIdentity:
    """Look a process up. Raises SessionError when it does not exist (or /proc hides it)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SessionError(f"host session: source process {pid} does not exist or /proc hides it ({error})") from error
    # The command name in field 2 may contain blanks and parentheses; fields are counted after the last one.
    fields = stat.rpartition(")")[2].split()
    uid_line = next((line for line in status.splitlines() if line.startswith("Uid:")), "")
    uids = tuple(int(word) for word in uid_line.split()[1:4])
    if len(fields) < 20 or len(uids) != 3:
        raise SessionError(f"host session: /proc/{pid} has an unexpected form")
    return ProcessIdentity(int(fields[19]), (uids[0], uids[1], uids[2]), fields[0] in ("Z", "X"))


def machine_id() -> str:
    """32 hex digits that differ between machines and between boots of one machine."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip().replace("-", "")
    except OSError:
        boot_id = ""
    if re.fullmatch(r"[0-9a-f]{32}", boot_id):
        return boot_id
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]


def pid_namespace() -> int:
    """Inode of our PID namespace; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def check_source(session: HostSession) -> None:
    """Check everything about a source that /proc can tell. Raises SessionError with what differs."""
    here = (machine_id(), pid_namespace())
    if session.machine != here[0]:
        raise SessionError(
            "host session comes from another machine or an earlier boot; the host engine reads within one host only"
        )
    if session.pid_namespace != here[1]:
        raise SessionError(
            f"host session comes from PID namespace {session.pid_namespace}, this process is in {here[1]}; "
            "run both engines in one container or share the PID namespace"
        )
    found = process_identity(session.pid)
    if found.zombie:
        raise SessionError(f"host session: source process {session.pid} has ended")
    if found.start_ticks != session.start_ticks:
        raise SessionError(
            f"host session: process {session.pid} started at tick {found.start_ticks}, the session says "
            f"{session.start_ticks}; the source was restarted or its process id reused"
        )
    ours = os.geteuid()
    if any(uid != ours for uid in found.uids):
        raise SessionError(
            f"host session: source process {session.pid} runs as users {found.uids}, this process as {ours}; "
            "the host engine reads only from processes of its own user"
        )


class ProofPage:
    """Owner of the magic and nonce of this process, on a page of its own."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self._page.madvise(_MADV_WIPEONFORK)
        except OSError as error:
            raise EngineError(
                f"host engine: MADV_WIPEONFORK failed ({error}); Linux 4.14 or later is needed"
            ) from error
        self._export = ctypes.c_char.from_buffer(self._page)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._page[:PROOF_BYTES] = PROOF_MAGIC + nonce
        identity = process_identity(self._owner_pid)
        self._session = HostSession(
            machine_id(),
            pid_namespace(),
            self._owner_pid,
            identity.start_ticks,
            ctypes.addressof(self._export),
            nonce,
        )

    @property
    def session(self) -> HostSession:
        """The session that this page proves. Raises StateError in a forked child, whose page is blank."""
        if os.getpid() != self._owner_pid:
            raise StateError(
                f"host engine was initialised in process {self._owner_pid} and used in its child {os.getpid()}; "
                "initialise an engine after the fork"
            )
        return self._session

    def wipe(self) -> None:
        """Make the session useless, also for a read that is running now. The page stays mapped until process end."""
        self._page[:PROOF_BYTES] = bytes(PROOF_BYTES)
