"""The `null` engine: moves nothing and succeeds at once. Measures what everything around an engine costs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from rd2h.engines.base import (
    READ_OK,
    AddressArray,
    EngineRole,
    MemoryRegion,
    ReadCode,
    ReadResult,
    check_descriptors,
)
from rd2h.engines.lifecycle import Lifecycle
from rd2h.engines.options import NullOptions
from rd2h.errors import SessionError

_PREFIX = "null:"
_MAX_SESSION_CHARS = 64


class NullEngine:
    """Same contract as the others, without bytes. Never for serving: the destination keeps what it held."""

    backend = "null"

    def __init__(self, options: NullOptions | None = None) -> None:
        self._options = options or NullOptions()
        self._lifecycle = Lifecycle(self.backend)
        self._session = _PREFIX + secrets.token_hex(16)

    def initialize(self, role: EngineRole) -> None:
        """Become ready."""
        with self._lifecycle.starting(role):
            pass

    def session(self) -> str:
        """A random session string."""
        self._lifecycle.require_ready("give a session")
        return self._session

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Nothing to do once the engine is ready."""
        self._lifecycle.require_ready("register memory")

    def open_session(self, session: str) -> None:
        """Accept any session of this kind. Raises SessionError for others."""
        self._lifecycle.require_ready("open a session")
        if not session.startswith(_PREFIX) or len(session) > _MAX_SESSION_CHARS:
            raise SessionError(
                f"session {session[:24]!r} is not one of the null engine; expected {_PREFIX}<hex digits>"
            )

    def batch_transfer_sync_read(
        self, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> ReadResult:
        """Check the shapes and succeed."""
        check_descriptors(local, peer, lengths)
        if not self._lifecycle.begin_read():
            return ReadResult(ReadCode.ENGINE_CLOSED, f"engine null is {self._lifecycle.state.value}, not ready")
        self._lifecycle.end_read()
        return READ_OK

    def get_rpc_port(self) -> int:
        """0: listens on no port."""
        return 0

    def close(self) -> None:
        """Stop accepting reads."""
        with self._lifecycle.closing(timeout_s=1.0):
            pass
