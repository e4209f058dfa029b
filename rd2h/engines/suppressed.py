"""An engine that does everything but read: the negative control of token-equality tests."""

from __future__ import annotations

from collections.abc import Sequence

from rd2h.engines.base import READ_OK, AddressArray, EngineRole, MemoryRegion, ReadResult, TransferEngine


class SuppressedReads:
    """Wraps an engine; reads report success and move nothing."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    @property
    def backend(self) -> str:
        """The wrapped engine's name."""
        return self._engine.backend

    def initialize(self, role: EngineRole) -> None:
        """As the wrapped engine."""
        self._engine.initialize(role)

    def session(self) -> str:
        """As the wrapped engine."""
        return self._engine.session()

    def register_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """As the wrapped engine."""
        self._engine.register_memory(regions)

    def open_session(self, session: str) -> None:
        """As the wrapped engine."""
        self._engine.open_session(session)

    def batch_transfer_sync_read(
        self, session: str, local: AddressArray, peer: AddressArray, lengths: AddressArray
    ) -> ReadResult:
        """Reads nothing."""
        return READ_OK

    def get_rpc_port(self) -> int:
        """As the wrapped engine."""
        return self._engine.get_rpc_port()

    def close(self) -> None:
        """As the wrapped engine."""
        self._engine.close()
