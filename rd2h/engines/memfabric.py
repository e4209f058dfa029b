"""The `memfabric` engine: production transfers between NPUs (and pinned host pools) through memfabric_hybrid.

The wheel is imported in `initialize`, never before. One native engine exists in a process; it is bound to role, device
and host name by the first `initialize`, and shared by later ones that ask for the same.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rd2h.engines.base import (
    READ_OK,
    AddressArray,
    EngineRole,
    MemoryRegion,
    ReadCode,
    ReadResult,
    check_descriptors,
    merge_regions,
)
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.memfabric_native import NATIVE_ERRORS, Binding, NativeEngine, acquire, release
from rd2h.engines.memfabric_session import format_session, parse_session
from rd2h.engines.npu import npu_device_setter
from rd2h.engines.options import MemfabricOptions
from rd2h.errors import EngineError, SessionError, StateError

logger = logging.getLogger(__name__)


class MemfabricEngine:
    """See the module text. Sessions are `host:rpc_port`; MemFabric itself connects at the first read of a session."""

    backend = "memfabric"

    def __init__(self, options: MemfabricOptions) -> None:
        self._options = options
        self._lifecycle = Lifecycle(self.backend)
        self._lock = threading.Lock()
        self._native: NativeEngine | None = None
        self._set_device: Callable[[int], None] | None = None
        self._threads = threading.local()
        # Least recently used first; bounded by options.max_sessions.
        self._sessions: OrderedDict[str, None] = OrderedDict()

    def initialize(self, role: EngineRole) -> None:
        """Import the wheel, bind the process, start the native engine. Raises EngineError with one clear text."""
        options = self._options
        with self._lifecycle.starting(role):
            self._set_device = npu_device_setter()
            binding = Binding(role, options.device_id, options.hostname, options.protocol)
            self._native = acquire(binding, options, self._bind_thread)

    def session(self) -> str:
        """`host:rpc_port`, IPv6 literals bracketed."""
        return format_session(self._options.hostname, self.get_rpc_port())

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Register every region not registered before. Raises EngineError naming the region that was refused."""
        self._lifecycle.require_ready("register memory")
        self._bind_thread()
        self._require_native().register(merge_regions(regions))

    def open_session(self, session: str) -> None:
        """Validate the address; MemFabric connects at the first read. Raises SessionError."""
        self._lifecycle.require_ready("open a session")
        self._remember_session(session)

    def _remember_session(self, session: str) -> None:
        with self._lock:
            if session in self._sessions:
                self._sessions.move_to_end(session)
                return
        parse_session(session)
        with self._lock:
            self._sessions[session] = None
            while len(self._sessions) > self._options.max_sessions:
                self._sessions.popitem(last=False)

    def batch_transfer_sync_read(
        self, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> ReadResult:
        """One native batched read. A non-zero native result or a native exception becomes a ReadResult."""
        count = check_descriptors(local, peer, lengths)
        if not self._lifecycle.begin_read():
            return ReadResult(ReadCode.ENGINE_CLOSED, f"engine memfabric is {self._lifecycle.state.value}, not ready")
        try:
            if self._lifecycle.role is not EngineRole.DECODE:
                raise StateError("engine memfabric: only a Decode reads; this engine is a Prefill")
            self._remember_session(session)
            self._bind_thread()
            if not count:
                # The native side has no meaning for an empty batch, and there is nothing to move.
                return READ_OK
            code = self._require_native().read(session, local.tolist(), peer.tolist(), lengths.tolist())
        except SessionError as error:
            return ReadResult(ReadCode.SESSION_REFUSED, str(error))
        except EngineError as error:
            return ReadResult(ReadCode.NATIVE_EXCEPTION, str(error))
        except NATIVE_ERRORS as error:
            return ReadResult(
                ReadCode.NATIVE_EXCEPTION, f"memfabric batch read of {count} descriptors raised {error!r}"
            )
        finally:
            self._lifecycle.end_read()
        if code:
            return ReadResult(code, f"memfabric batch read failed, ret={code} ({count} descriptors)")
        return READ_OK

    def get_rpc_port(self) -> int:
        """The port of the native engine. Raises StateError before `initialize`, EngineError when it has none."""
        self._lifecycle.require_ready("give its port")
        return self._require_native().rpc_port

    def close(self) -> None:
        """Wait for running reads, then unregister memory and destroy the native engine when nobody else uses it."""
        with self._lifecycle.closing(self._options.close_timeout_s) as was_ready:
            if was_ready and self._native is not None:
                release(self._native)
                self._native = None
            with self._lock:
                self._sessions.clear()

    def _require_native(self) -> NativeEngine:
        if self._native is None:
            raise StateError("engine memfabric: not initialised")
        return self._native

    def _bind_thread(self) -> None:
        """Select our device in the calling thread, once a thread: device contexts belong to threads."""
        if self._set_device is None or getattr(self._threads, "bound", False):
            return
        try:
            self._set_device(self._options.device_id)
        except NATIVE_ERRORS as error:
            raise EngineError(
                f"memfabric: cannot select NPU {self._options.device_id} in this thread: {error}"
            ) from error
        self._threads.bound = True
