"""Queues of registry changes."""

import pytest
from meta_builders import decode
from rd2h_client.v1.engine_registry_pb2 import ENGINE_ROLE_UNSPECIFIED, EngineEvent
from rd2h_meta.watchers import History, Watcher


def change(revision: int) -> EngineEvent:
    return EngineEvent(kind=EngineEvent.KIND_UPDATED, engine=decode(), revision=revision)


def test_who_only_wants_to_be_woken_forgets_the_rest() -> None:
    woken: list[int] = []
    watcher = Watcher(ENGINE_ROLE_UNSPECIFIED, 2, lambda: woken.append(1))
    for revision in range(1, 6):
        watcher.offer(change(revision))
    assert watcher.overflowed
    assert len(woken) == 3  # twice for events, once for the overflow
    watcher.discard()
    assert not watcher.overflowed
    watcher.offer(change(6))
    assert (len(watcher), len(woken)) == (1, 4)


def test_history_takes_revisions_in_order_only() -> None:
    history = History(10)
    history.append(change(1))
    with pytest.raises(ValueError, match="got 3, allowed: 2"):
        history.append(change(3))
