"""The null engine keeps the contract without moving bytes."""

import numpy as np
import pytest

from rd2h.engines import EngineRole, MemoryRegion, ReadCode, create_engine
from rd2h.errors import EngineError, SessionError, StateError


def test_contract():
    engine = create_engine("null")
    one = np.ones(1, np.uint64)
    assert engine.batch_transfer_sync_read("x", one, one, one).code == ReadCode.ENGINE_CLOSED
    with pytest.raises(StateError, match="while new"):
        engine.register_memory([MemoryRegion(1, 1)])
    engine.initialize(EngineRole.DECODE)
    engine.register_memory([MemoryRegion(1, 1)])
    engine.open_session(engine.session())
    with pytest.raises(SessionError, match="not one of the null engine"):
        engine.open_session("host:x")
    target = np.full(16, 0xA5, np.uint8)
    result = engine.batch_transfer_sync_read(
        engine.session(), one * np.uint64(target.ctypes.data), one, one * np.uint64(16)
    )
    assert result.ok
    assert (target == 0xA5).all()
    assert engine.get_rpc_port() == 0
    with pytest.raises(EngineError, match="dtype"):
        engine.batch_transfer_sync_read("x", target, one, one)
    engine.close()
    engine.close()
    assert engine.batch_transfer_sync_read("x", one, one, one).code == ReadCode.ENGINE_CLOSED
