"""Prefill's worker half: chunks for each endpoint, layers told once, failures kept within bounds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from connector_standins import child_params, dispatch

from rd2h.gates import ALL_BLOCKS, Component, Slot, Writes
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout
from rd2h.params import RemoteDecode, parse_remote_decodes
from rd2h.prefill import worker as worker_module
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.worker import PrefillWorker
from rd2h.stats import TransferStats
from rd2h.steps import ChildFailure, PrefillStep, Publication
from rd2h.timeline import Timeline
from rd2h.wire import Refusal, decode_read_requests

NONE = Writes(frozenset(), frozenset())


@dataclass
class RecordingPublisher:
    """What would go out."""

    published: list[tuple[int, list[EndpointChunk], bool]] = field(default_factory=list)
    failed: list[tuple[EndpointKey, list[Refusal]]] = field(default_factory=list)
    waits: list[tuple[list[Slot] | None, Writes]] = field(default_factory=list)
    stopped_tokens: set[bytes] = field(default_factory=set)
    alive: bool = True

    def publish(
        self, layer_idx: int, chunks: Sequence[EndpointChunk], *, last_layer: bool, after: object = None
    ) -> None:
        assert after is None, "nothing is recorded on a CPU"
        self.published.append((layer_idx, list(chunks), last_layer))

    def fail_children(self, key: EndpointKey, failures: Sequence[Refusal]) -> None:
        self.failed.append((key, list(failures)))

    def stopped(self, token: bytes) -> str | None:
        return "gone" if token in self.stopped_tokens else None

    def wait_writable(self, slots: Iterable[Slot] | None, writes: Writes) -> None:
        self.waits.append((list(slots) if slots is not None else None, writes))


def layout(layers: int) -> CacheLayout:
    return CacheLayout(
        tuple(LayerLayout(f"l.{i}", (TensorLayout(0x1000 * (i + 1), 64, 8),), None, None) for i in range(layers))
    )


def make(
    layers: int = 2, *, shared: bool = False, tp_rank: int = 0, tp_size: int = 1
) -> tuple[PrefillWorker, RecordingPublisher]:
    publisher = RecordingPublisher()
    slots = [(Slot(Component.MAIN, 0 if shared else i),) for i in range(layers)]
    double: Any = publisher
    made = PrefillWorker(layout(layers), slots, tp_rank, tp_size, double, TransferStats(), Timeline("P", None))
    return made, publisher


def child(**changes: Any) -> RemoteDecode:
    return parse_remote_decodes(dispatch(child_params(**changes))).children[0]


def publication(of: RemoteDecode, blocks: Sequence[int] = (1, 2), final: bool = True) -> Publication:
    return Publication(of, "external", 0, list(blocks), [], final)


def step(*publications: Publication, failures: Sequence[ChildFailure] = ()) -> PrefillStep:
    return PrefillStep(NONE, publications, failures)


def test_every_layer_is_told_once_in_order_and_the_last_says_so() -> None:
    worker, publisher = make(3)
    worker.begin(step(publication(child())))
    for name in ("l.0", "l.0", "l.1", "l.2", "l.1"):
        worker.layer_written(name)
    worker.end()
    assert [(layer, last) for layer, _, last in publisher.published] == [(0, False), (1, False), (2, True)]
    assert worker.take_failures() == []


@pytest.mark.parametrize("name", ["", "l.9", "l.0.indexer.k_cache"])
def test_a_hook_for_something_else_changes_nothing(name: str) -> None:
    """Runtimes call the hook with an empty or an indexer's name too; an exception there would end the engine."""
    worker, publisher = make()
    worker.begin(step(publication(child())))
    worker.layer_written(name)
    worker.before_layer(name)
    assert publisher.published == []
    assert publisher.waits == []


def test_layers_that_no_hook_announced_fail_their_children() -> None:
    worker, publisher = make(3)
    told = child()
    worker.begin(step(publication(told)))
    worker.layer_written("l.0")
    worker.end()
    (failure,) = worker.take_failures()
    assert failure.child == told
    assert "2 of 3 layers" in failure.reason
    assert publisher.failed[0][1][0].token == told.token
    worker.end()
    assert worker.take_failures() == []


def test_children_of_one_endpoint_travel_together() -> None:
    worker, publisher = make(1)
    a, b = child(token=1), child(token=2)
    other = child(token=3, remote_port=30000)
    worker.begin(step(publication(a, [1]), publication(other, [2]), publication(b, [3], final=False)))
    worker.layer_written("l.0")
    ((_, chunks, _),) = publisher.published
    assert [(chunk.key.port, chunk.tokens, chunk.done_tokens) for chunk in chunks] == [
        (20050, (a.token, b.token), (a.token,)),
        (30000, (other.token,), (other.token,)),
    ]
    assert [r.main_blocks.tolist() for r in decode_read_requests(chunks[0].requests_raw)] == [[1], [3]]
    assert chunks[0].blocks.main == {1, 3}


def test_ratio_belongs_to_the_request_not_to_the_batch() -> None:
    """A wrong TP size in one request's parameters must not give its neighbours a wrong share."""
    worker, publisher = make(1, tp_rank=0, tp_size=4)
    good, odd = child(token=1, remote_tp_size=2), child(token=2, remote_tp_size=4)
    for pair in ((good, odd), (odd, good)):
        publisher.published.clear()
        worker.begin(step(*(publication(one) for one in pair)))
        worker.layer_written("l.0")
        ((_, chunks, _),) = publisher.published
        assert {chunk.tokens: chunk.ratio for chunk in chunks} == {(good.token,): 2, (odd.token,): 1}


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "expected"),
    [
        (1, 1, [(0, 0)]),
        (2, 1, [(0, 0), (0, 1)]),
        (4, 2, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (8, 2, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]),
    ],
)
def test_every_rank_finds_its_decode_rank_and_member(p_tp: int, d_tp: int, expected: list[tuple[int, int]]) -> None:
    found = []
    for rank in range(p_tp):
        worker, publisher = make(1, tp_rank=rank, tp_size=p_tp)
        worker.begin(step(publication(child(remote_tp_size=d_tp))))
        worker.layer_written("l.0")
        ((_, (chunk,), _),) = publisher.published
        assert chunk.ratio == p_tp // d_tp
        found.append((chunk.key.port - 20050, chunk.member))
    assert found == expected


def test_port_outside_the_range_fails_that_child_alone() -> None:
    worker, publisher = make(1, tp_rank=1, tp_size=2)
    bad, good = child(token=1, remote_port=65535, remote_tp_size=2), child(token=2, remote_tp_size=2)
    worker.begin(step(publication(bad), publication(good)))
    worker.layer_written("l.0")
    (failure,) = worker.take_failures()
    assert failure.child == bad
    assert "65536" in failure.reason
    ((_, (chunk,), _),) = publisher.published
    assert chunk.tokens == (good.token,)
    # Its failure cannot be sent anywhere either.
    worker.begin(step(failures=[ChildFailure(bad, "x")]))
    assert publisher.failed == []


def test_stopped_children_are_left_out() -> None:
    worker, publisher = make(1)
    a, b = child(token=1), child(token=2)
    publisher.stopped_tokens = {a.token or b""}
    worker.begin(step(publication(a), publication(b)))
    worker.layer_written("l.0")
    ((_, (chunk,), _),) = publisher.published
    assert chunk.tokens == (b.token,)


def test_legacy_decode_is_told_external_ids_and_no_tokens() -> None:
    worker, publisher = make(1)
    legacy = child_params(generation=None)
    del legacy["token"]
    worker.begin(step(publication(parse_remote_decodes(dispatch(legacy)).children[0])))
    worker.layer_written("l.0")
    ((_, (chunk,), _),) = publisher.published
    assert (chunk.done_ids, chunk.tokens, chunk.done_tokens) == (("external",), (), ())
    (request,) = decode_read_requests(chunk.requests_raw)
    assert (request.request_id, request.token) == ("external", None)


def test_end_without_blocks_is_still_told() -> None:
    worker, publisher = make(1)
    done = child()
    worker.begin(step(publication(done, [])))
    worker.layer_written("l.0")
    ((_, (chunk,), _),) = publisher.published
    assert chunk.done_tokens == (done.token,)
    assert len(decode_read_requests(chunk.requests_raw)) == 0


def test_failures_of_the_publisher_find_their_child_once() -> None:
    worker, _ = make(1)
    lost = child()
    worker.begin(step(publication(lost)))
    assert lost.token is not None
    refusal = Refusal(lost.token, "peer lost")
    worker.on_failure([refusal, Refusal(b"?" * 16, "unknown")])
    worker.on_failure([refusal])
    assert worker.take_failures() == [ChildFailure(lost, "peer lost")]


def test_memory_of_children_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every child ever served must not stay; the youngest are those that may still fail."""
    monkeypatch.setattr(worker_module, "MAX_REMEMBERED_CHILDREN", 8)
    worker, _ = make(1)
    for number in range(100):
        worker.begin(step(publication(child(token=number + 1))))
        worker.layer_written("l.0")
        worker.end()
    assert worker.remembered_children <= 8
    worker.on_failure([Refusal(bytes.fromhex(f"{100:032x}"), "late")])
    assert len(worker.take_failures()) == 1


def test_waits_before_writing() -> None:
    worker, publisher = make(2)
    writes = Writes(frozenset({1}), frozenset({2}))
    worker.before_writes(PrefillStep(writes))
    worker.wait_layer(1)
    worker.before_layer("l.0")
    assert publisher.waits == [(None, writes), ([Slot(Component.MAIN, 1)], ALL_BLOCKS)]
    worker, publisher = make(2, shared=True)
    assert worker.buffers_are_shared
    worker.before_layer("l.1")
    assert publisher.waits == [([Slot(Component.MAIN, 0)], ALL_BLOCKS)]


@pytest.mark.parametrize("layer_idx", [-1, 2, 99])
def test_wait_for_a_layer_that_does_not_exist_waits_for_all(layer_idx: int) -> None:
    """A sibling that counts layers otherwise than we do must never be told that a buffer is free."""
    worker, publisher = make(2)
    worker.wait_layer(layer_idx)
    assert publisher.waits == [(None, ALL_BLOCKS)]
