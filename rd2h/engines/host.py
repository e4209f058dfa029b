"""The `host` engine: real bytes between two processes of one host and one user, for machines without an NPU.

Same contract as the production engine. A read is one copy by the kernel from the source's pages into ours, with no
cooperation of the source. The engine cannot know which regions the peer has registered: that peer addresses lie in
published cache blocks is checked by the layer above, which has the peer's layout.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from rd2h.engines.base import (
    AddressArray,
    EngineRole,
    MemoryRegion,
    ReadCode,
    ReadResult,
    check_descriptors,
    merge_regions,
)
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.options import HostOptions
from rd2h.engines.proof import HostSession, ProofPage, check_source
from rd2h.engines.vmread import VectorReader, yama_scope
from rd2h.errors import EngineError, SessionError, StateError

logger = logging.getLogger(__name__)

_PR_GET_DUMPABLE = 3
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_NO_DESCRIPTORS = np.empty(0, dtype=np.uint64)

_prctl = ctypes.CDLL(None, use_errno=True).prctl


class HostEngine:
    """See the module text. Prefill publishes a session; Decode opens it and reads."""

    backend = "host"

    def __init__(self, options: HostOptions | None = None) -> None:
        self._options = options or HostOptions()
        self._lifecycle = Lifecycle(self.backend)
        self._lock = threading.Lock()
        self._regions: tuple[MemoryRegion, ...] = ()
        self._proof: ProofPage | None = None
        # Least recently used first; bounded by options.max_sessions. A forgotten session is only validated again.
        self._sessions: OrderedDict[str, HostSession] = OrderedDict()
        self._threads = threading.local()

    def initialize(self, role: EngineRole) -> None:
        """Prefill: create the proof page and allow peers to read. Raises EngineError where neither can work."""
        with self._lifecycle.starting(role):
            if role is EngineRole.PREFILL:
                self._proof = ProofPage()
                allow_readers()

    def session(self) -> str:
        """The session string of this Prefill process. Raises StateError on Decode, before start and after close."""
        self._lifecycle.require_ready("give a session")
        if self._proof is None:
            raise StateError("engine host: only a Prefill has a session; this engine is a Decode")
        return str(self._proof.session)

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Remember the regions. Nothing has to be pinned: the kernel pins pages while it copies them."""
        self._lifecycle.require_ready("register memory")
        with self._lock:
            self._regions = merge_regions((*self._regions, *regions))

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """The registered regions, merged and sorted."""
        return self._regions

    def open_session(self, session: str) -> None:
        """Check that the source is alive, is the one that published the session, and may be read by us."""
        self._lifecycle.require_ready("open a session")
        self._require_decode()
        if not self._lifecycle.begin_read():
            raise StateError("engine host: closed while a session was being opened")
        try:
            self._find_session(session, fresh=True)
        finally:
            self._lifecycle.end_read()

    def batch_transfer_sync_read(
        self, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> ReadResult:
        """Copy all descriptors; opens the session when that has not been done. See TransferEngine."""
        check_descriptors(local, peer, lengths)
        if not self._lifecycle.begin_read():
            return ReadResult(ReadCode.ENGINE_CLOSED, f"engine host is {self._lifecycle.state.value}, not ready")
        try:
            self._require_decode()
            source = self._find_session(session)
            result = self._reader().read(source, local, peer, lengths)
        except SessionError as error:
            return ReadResult(ReadCode.SESSION_REFUSED, str(error))
        finally:
            self._lifecycle.end_read()
        if result.code == ReadCode.SESSION_LOST:
            self._forget(session)
        return result

    def get_rpc_port(self) -> int:
        """0: the host engine listens on no port."""
        return 0

    def close(self) -> None:
        """Wait for running reads of ours, then wipe the proof so that no peer reads from us any more."""
        with self._lifecycle.closing(self._options.close_timeout_s):
            if self._proof is not None:
                self._proof.wipe()
            with self._lock:
                self._sessions.clear()
                self._regions = ()

    def _require_decode(self) -> None:
        if self._lifecycle.role is not EngineRole.DECODE:
            raise StateError("engine host: only a Decode reads; this engine is a Prefill")

    def _reader(self) -> VectorReader:
        reader: VectorReader | None = getattr(self._threads, "reader", None)
        if reader is None:
            reader = self._threads.reader = VectorReader()
        return reader

    def _find_session(self, text: str, *, fresh: bool = False) -> HostSession:
        """The validated session, from the table unless `fresh`. Raises SessionError."""
        with self._lock:
            known = self._sessions.get(text)
            if known is not None and not fresh:
                self._sessions.move_to_end(text)
                return known
        source = HostSession.parse(text)
        check_source(source)
        result = self._reader().read(source, _NO_DESCRIPTORS, _NO_DESCRIPTORS, _NO_DESCRIPTORS)
        if not result.ok:
            self._forget(text)
            raise SessionError(result.message)
        with self._lock:
            self._sessions[text] = source
            self._sessions.move_to_end(text)
            while len(self._sessions) > self._options.max_sessions:
                self._sessions.popitem(last=False)
        return source

    def _forget(self, text: str) -> None:
        with self._lock:
            self._sessions.pop(text, None)


def allow_readers() -> None:
    """Let other processes of this user read our memory, as far as a process may decide that itself.

    Under Yama's scope 1 a process names its tracers; the readers are not known beforehand, so any process of this user
    is named. Raises EngineError when the kernel refuses; scopes that only an administrator can change are logged.
    """
    scope = yama_scope()
    if scope == 1 and _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) != 0:
        raise EngineError(f"host engine: prctl(PR_SET_PTRACER) failed with errno {ctypes.get_errno()}")
    if scope is not None and scope >= 2:
        logger.warning("Yama ptrace_scope is %d: only readers with CAP_SYS_PTRACE can read this process", scope)
    if _prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 1:
        logger.warning("this process is not dumpable: only readers with CAP_SYS_PTRACE can read it")
