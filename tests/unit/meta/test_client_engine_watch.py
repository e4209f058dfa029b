"""The client's watch of the registry, without a network."""

from meta_builders import decode
from rd2h_client.engine_watch import EngineBatch, EngineWatch
from rd2h_client.v1.engine_registry_pb2 import ENGINE_ROLE_UNSPECIFIED, EngineEvent, WatchEnginesResponse


def snapshot(*names: str, continues: bool = False, revision: int = 5) -> WatchEnginesResponse:
    events = [EngineEvent(kind=EngineEvent.KIND_ADDED, engine=decode(name)) for name in names]
    return WatchEnginesResponse(
        events=events, snapshot=True, snapshot_continues=continues, revision=revision, service_id="run"
    )


def names(batch: EngineBatch | None) -> list[str]:
    assert batch is not None
    return [event.engine.engine_id for event in batch.events]


def test_a_snapshot_in_parts_is_one_batch() -> None:
    watch = EngineWatch(ENGINE_ROLE_UNSPECIFIED)
    watch.request()
    assert watch.receive(snapshot("a", continues=True), 0.0) is None
    assert names(watch.receive(snapshot("b"), 0.0)) == ["a", "b"]
    assert watch.request().after_revision == 5


def test_half_a_snapshot_of_a_lost_stream_is_forgotten() -> None:
    watch = EngineWatch(ENGINE_ROLE_UNSPECIFIED)
    watch.request()
    watch.receive(snapshot("gone", "a", continues=True), 0.0)
    request = watch.request()
    assert (request.after_revision, request.service_id) == (0, "")
    assert names(watch.receive(snapshot("a", "b"), 0.0)) == ["a", "b"]
