"""Decisions of the pull book that need no socket: early failures, refusals before the first chunk."""

import secrets

import numpy as np
import pytest

from rd2h.children import ChildSpec, Outcome
from rd2h.decode.book import Answer, PullBook, ReadEnd, ReadTask
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.router import Received
from rd2h.engines import READ_OK
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, encode_layer_map
from rd2h.stats import TransferStats
from rd2h.wire import (
    PeerInfo,
    ReadFailed,
    ReadRequest,
    Refusal,
    decode_from_decode,
    encode_mf_meta,
    encode_pong,
    encode_prefill_failed,
    encode_read_requests,
    encode_ready,
)

GENERATION = 7
PREFILL = 9
PEER = b"peer"


def layout(block_bytes: int = 64, base: int = 1 << 20) -> CacheLayout:
    return CacheLayout((LayerLayout("layers.0.attn", (TensorLayout(base, block_bytes, 16),)),))


def book() -> PullBook:
    options = PullerOptions("127.0.0.1", 0, GENERATION, b"", 1)
    made = PullBook(options, Destination(layout(), 0, 1, False), TransferStats())
    made.trust(frozenset({PREFILL}), 0.0)
    return made


def spec(token: bytes) -> ChildSpec:
    blocks = np.arange(4, dtype=np.int64)
    return ChildSpec(token, "request", "request", blocks, 0, np.empty(0, np.int64), 0)


def connect(made: PullBook, source: CacheLayout) -> None:
    meta = encode_mf_meta("session", encode_layer_map(source), PeerInfo(1, PREFILL, b"", 1, 0))
    connection, _ = made.accept(Received(PEER, meta, "127.0.0.1"), 0.0, 0)
    assert connection is not None
    step = made.next_step(connection, 0.0, 1)
    assert isinstance(step, Answer)
    assert step.open_session == "session"
    made.session_opened(connection, 0, "")
    assert made.next_step(connection, 0.0, 1) is None


def test_a_failure_that_comes_before_its_destination_is_not_forgotten() -> None:
    made = book()
    connect(made, layout())
    token = secrets.token_bytes(16)
    made.accept(Received(PEER, encode_prefill_failed(GENERATION, [Refusal(token, "out of memory")])), 0.0, 0)
    made.add([spec(token)], 0.0)
    (report,) = made.take_finished(0.0)
    assert report.outcome is Outcome.FAILED
    assert report.reason == "Prefill failed: out of memory"


def test_a_layer_refused_as_a_whole_fails_its_children_even_at_their_first_message() -> None:
    made = book()
    connect(made, layout(block_bytes=128))
    token = secrets.token_bytes(16)
    made.add([spec(token)], 0.0)
    blocks = np.arange(4, dtype=np.int64)
    requests = encode_read_requests([ReadRequest("request", blocks, np.empty(0, np.int64), 0, 0, token)])
    ready = encode_ready(0, "layers.0.attn", requests, (), 0, 1, (GENERATION, 1, ()))
    connection, _ = made.accept(Received(PEER, ready), 0.0, 0)
    assert connection is not None
    step = made.next_step(connection, 0.0, 1)
    assert isinstance(step, Answer)
    reply = decode_from_decode(step.payloads[0])
    assert isinstance(reply, ReadFailed)
    assert "block bytes 128 on Prefill, 64 on Decode" in reply.error
    (report,) = made.take_finished(0.0)
    assert report.outcome is Outcome.FAILED
    assert report.reason == reply.error


@pytest.mark.parametrize("abort", ["before the last layer", "after the last layer", "after the report"])
def test_an_abort_that_races_the_end_is_one_report(abort: str) -> None:
    made = book()
    connect(made, layout())
    token = secrets.token_bytes(16)
    made.add([spec(token)], 0.0)
    blocks = np.arange(4, dtype=np.int64)
    requests = encode_read_requests([ReadRequest("request", blocks, np.empty(0, np.int64), 0, 0, token)])
    ready = encode_ready(0, "layers.0.attn", requests, ("request",), 0, 1, (GENERATION, 1, (token,)))
    made.accept(Received(PEER, encode_pong(PREFILL, 0)), 0.0, 1)
    connection, _ = made.accept(Received(PEER, ready), 0.0, 1)
    assert connection is not None
    task = made.next_step(connection, 0.0, 1)
    assert isinstance(task, ReadTask)
    if abort == "before the last layer":
        made.abort(["request"], 0.0)
        assert made.take_finished(0.0) == [], "a read is in flight"
    made.finish_read(connection, task, ReadEnd(READ_OK, 0.0), 0.0, 1)
    if abort == "after the last layer":
        made.abort(["request"], 0.0)
    reports = made.take_finished(0.0)
    if abort == "after the report":
        made.abort(["request"], 0.0)
    reports += made.take_finished(0.0)
    assert [report.request_id for report in reports] == ["request"]
    wanted = Outcome.ABORTED if abort == "before the last layer" else Outcome.DONE
    assert reports[0].outcome is wanted
    assert made.counts() == (0, 0, 0)
