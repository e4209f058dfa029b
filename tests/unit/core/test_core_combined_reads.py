"""Layers of a chunk that wait together become one read; each is still answered by itself."""

import numpy as np
import pytest
from core_pull import LAYERS, PEER, PREFILL, Pull

from rd2h.children import Outcome
from rd2h.decode.planner import COMBINED_BYTES, COMBINED_LAYERS
from rd2h.decode.router import Received
from rd2h.decode.steps import Answer, ReadTask
from rd2h.engines import ReadResult
from rd2h.layout import encode_layer_map
from rd2h.wire import (
    PeerInfo,
    ReadDone,
    ReadFailed,
    ReadRequest,
    decode_from_decode,
    encode_mf_meta,
    encode_read_requests,
)


def test_waiting_layers_are_one_read_and_one_answer_each() -> None:
    pull = Pull()
    for layer in range(5):
        pull.ready(layer)
    task = pull.read()
    assert [layer.layer_idx for layer in task.layers] == [0, 1, 2, 3, 4]
    assert task.descriptors.nbytes == 5 * 4 * 64
    expected = [
        (local + block * 64, source + peer * 64, 128)
        for local, source in (
            (pull.local.layers[layer].main[0].base_addr, pull.source.layers[layer].main[0].base_addr)
            for layer in range(5)
        )
        for block, peer in ((0, 3), (2, 8))
    ]
    assert list(zip(*(column.tolist() for column in task.descriptors[:3]), strict=True)) == expected
    assert pull.finish(task) == [ReadDone(layer, 100 + layer) for layer in range(5)]
    assert pull.step() is None


def test_a_prefill_that_can_take_it_gets_one_answer_for_all() -> None:
    pull = Pull(joint_acks=True)
    pull.ready(0)
    assert pull.finish(pull.read()) == [ReadDone(0, 100)]
    for layer in range(1, 5):
        pull.ready(layer)
    assert pull.finish(pull.read()) == [ReadDone(1, 101, (), ((2, 102), (3, 103), (4, 104)))]
    for layer in range(5, 7):
        pull.ready(layer)
    assert len(pull.finish(pull.read(), ReadResult(5, "broken"))) == 2, "failures are told one by one"


def test_the_end_in_a_combined_read_completes_the_child_once() -> None:
    pull = Pull()
    for layer in range(LAYERS):
        pull.ready(layer, last=layer == LAYERS - 1)
    sizes = []
    while (step := pull.step()) is not None:
        assert isinstance(step, ReadTask)
        sizes.append(len(step.layers))
        assert pull.book.take_finished(0.0) == []
        pull.finish(step)
    assert sizes == [COMBINED_LAYERS, COMBINED_LAYERS, LAYERS - 2 * COMBINED_LAYERS]
    (report,) = pull.book.take_finished(0.0)
    assert report.outcome is Outcome.DONE


def test_an_error_fails_every_layer_of_the_read() -> None:
    pull = Pull()
    for layer in range(3):
        pull.ready(layer)
    replies = pull.finish(pull.read(), ReadResult(5, "broken"))
    assert replies == [ReadFailed(layer, "broken", 100 + layer) for layer in range(3)]


@pytest.mark.parametrize("between", ["unknown layer", "other requests", "repeated layer", "metadata"])
def test_what_must_be_handled_by_itself_ends_a_combined_read(between: str) -> None:
    pull = Pull()
    pull.ready(0)
    pull.ready(1)
    if between == "unknown layer":
        pull.ready(2, name="no such layer")
    elif between == "other requests":
        other = encode_read_requests([ReadRequest("request", np.arange(1), np.empty(0, np.int64), 0, 0, pull.token)])
        pull.ready(2, requests=other)
    elif between == "repeated layer":
        pull.ready(1)
    else:
        meta = encode_mf_meta("session", encode_layer_map(pull.source), PeerInfo(1, PREFILL, b"", 1, 0))
        pull.book.accept(Received(PEER, meta), 0.0, 1)
    pull.ready(3)
    task = pull.read()
    assert [layer.layer_idx for layer in task.layers] == [0, 1]
    pull.finish(task)
    step = pull.step()
    if between == "unknown layer":
        assert isinstance(step, Answer)
        reply = decode_from_decode(step.payloads[0])
        assert isinstance(reply, ReadFailed)
        assert "'no such layer'" in reply.error
    elif between == "metadata":
        assert isinstance(step, Answer)
        assert step.open_session == "session"
    else:
        assert isinstance(step, ReadTask)
        assert step.layers[0].layer_idx == (1 if between == "repeated layer" else 2)


def test_large_layers_are_read_one_by_one() -> None:
    pull = Pull(block_bytes=COMBINED_BYTES // 8 + 4096)  # four blocks: a little more than half of the limit
    pull.ready(0)
    pull.ready(1)
    assert [len(pull.read().layers), len(pull.read().layers)] == [1, 1]


def test_combined_layers_stay_within_the_limit() -> None:
    pull = Pull(block_bytes=COMBINED_BYTES // 16)  # four blocks: a quarter of the limit
    for layer in range(6):
        pull.ready(layer)
    assert [len(pull.read().layers), len(pull.read().layers)] == [4, 2]


def test_every_layer_knows_its_part_of_the_bytes() -> None:
    pull = Pull()
    for layer in range(3):
        pull.ready(layer)
    task = pull.read()
    assert [layer.nbytes for layer in task.layers] == [4 * 64] * 3
    assert sum(layer.nbytes for layer in task.layers) == task.descriptors.nbytes
