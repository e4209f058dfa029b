"""Queues of registry changes."""

import pytest
from meta_builders import decode
from rd2h_client.v1.engine_registry_pb2 import EngineEvent
from rd2h_meta.watchers import History


def change(revision: int) -> EngineEvent:
    return EngineEvent(kind=EngineEvent.KIND_UPDATED, engine=decode(), revision=revision)


def test_history_takes_revisions_in_order_only() -> None:
    history = History(10)
    history.append(change(1))
    with pytest.raises(ValueError, match="got 3, allowed: 2"):
        history.append(change(3))
