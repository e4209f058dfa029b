"""Peers without our extensions, scripted frame by frame, to the end of a request; in both directions."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from harness.cache import Block, Cache, CacheSpec
from harness.pair import DECODE_OPTIONS, Decode, Prefill, Prompts, parts
from harness.plans import Child
from harness.scripted import ScriptedDecode, ScriptedPrefill
from harness.waiting import stays, wait_for
from harness.worker import Worker

from rd2h.engines import EngineRole, create_engine
from rd2h.layout import decode_layer_map
from rd2h.plan import ChunkPlan, coalesce
from rd2h.prefill.options import PublisherOptions
from rd2h.wire import decode_read_requests

SPEC = CacheSpec(layers=3, blocks=48)
OTHER_OWNER = 0x77
LEGACY_OPTIONS = replace(DECODE_OPTIONS, park_timeout_s=0.5, legacy_hosts=frozenset({"127.0.0.1"}))
TakeWorker = Callable[[], Worker]
VECTORS = json.loads((Path(__file__).parents[2] / "data" / "wire-vectors.json").read_text(encoding="utf-8"))


def vector(name: str) -> bytes:
    """Exact bytes of one message of a legacy peer."""
    return bytes.fromhex(next(item["hex"] for item in VECTORS["vectors"] if item["name"] == name))


def legacy_child(prompts: Prompts, blocks: int, external_id: str) -> Child:
    """A child that a legacy Prefill knows only by its external id."""
    return prompts.child(blocks, name=external_id + "-01234567", external_id=external_id)


class LegacyPrefill:
    """A Prefill of old, by hand: its memory is real, its messages have the old forms."""

    def __init__(self, prefill: Prefill, decode: Decode) -> None:
        self._prefill, self.wire = prefill, ScriptedPrefill(decode.address.base_port)

    def metadata(self) -> None:
        """Three fields."""
        fields = (b"mf_meta", self._prefill.worker.call("session"), self._prefill.worker.call("layer_map"))
        self.wire.send(msgpack.packb(fields, use_bin_type=True))

    def ready(
        self, layer: int, children: list[Child], done: list[str], form: str, tp: tuple[int, int] = (0, 1)
    ) -> None:
        """One layer of whole prompts; ``form``: "7" or "5" positions, "5/2" with two-field read requests too."""
        requests: list[tuple[object, ...]] = [
            (child.external_id, child.p_main, child.p_indexer, child.start, child.start)
            if form != "5/2"
            else (child.external_id, child.p_main)
            for child in children
        ]
        message: tuple[object, ...] = (
            b"read_ready_batch",
            layer,
            f"model.layers.{layer}.self_attn.attn",
            requests,
            done,
        )
        self.wire.send(msgpack.packb(message + tp if form == "7" else message, use_bin_type=True))

    def run(self, children: list[Child], form: str = "7") -> None:
        """All layers, one after another, checking each answer byte by byte."""
        for layer in range(SPEC.layers):
            done = [child.external_id for child in children] if layer == SPEC.layers - 1 else []
            self.ready(layer, children, done, form)
            assert self.wire.receive_raw() == msgpack.packb((b"read_done", layer), use_bin_type=True)


@pytest.fixture
def legacy(take_worker: TakeWorker) -> Iterator[tuple[LegacyPrefill, Prefill, Decode, Prompts]]:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = Decode.start(take_worker(), SPEC, options=LEGACY_OPTIONS)
    peer = LegacyPrefill(prefill, decode)
    yield peer, prefill, decode, Prompts(SPEC)
    peer.wire.close()


def compute(prefill: Prefill, decode: Decode, *children: Child) -> None:
    """Write the prompts into Prefill's memory."""
    prefill.worker.call("write", [part for child in children for part in parts(child, decode.address)])


@pytest.mark.parametrize("form", ["7", "5", "5/2"])
def test_legacy_prefill_to_the_end(legacy: tuple[LegacyPrefill, Prefill, Decode, Prompts], form: str) -> None:
    peer, prefill, decode, prompts = legacy
    children = [legacy_child(prompts, 5, "cmpl-a-0"), legacy_child(prompts, 3, "cmpl-a-1")]
    if form == "5/2":
        # One id list serves both components.
        children = [replace(child, p_indexer=child.p_main) for child in children]
    decode.add(*children)
    decode.expect(*children)
    compute(prefill, decode, *children)
    peer.metadata()
    assert peer.wire.receive_raw() == vector("ack")
    peer.run(children, form)
    for child in children:
        decode.wait_reported(child, "done")
    decode.check()
    decode.check_baseline()
    assert peer.wire.silent(0.2)  # no heartbeat, no extension towards a legacy peer


def test_legacy_prefill_with_unknown_request(legacy: tuple[LegacyPrefill, Prefill, Decode, Prompts]) -> None:
    peer, prefill, decode, prompts = legacy
    known, unknown = legacy_child(prompts, 4, "cmpl-k-0"), legacy_child(prompts, 4, "cmpl-u-0")
    decode.add(known)
    decode.expect(known)
    compute(prefill, decode, known, unknown)
    peer.metadata()
    peer.wire.receive_raw()
    peer.run([known, unknown])
    decode.wait_reported(known, "done")
    decode.check()
    decode.check_baseline()


def test_legacy_name_and_blocks_used_again(legacy: tuple[LegacyPrefill, Prefill, Decode, Prompts]) -> None:
    """The second request has the name and, on Prefill, even the block ids of the first."""
    peer, prefill, decode, prompts = legacy
    first = legacy_child(prompts, 4, "cmpl-r-0")
    second = replace(
        legacy_child(prompts, 4, "cmpl-r-0"), name="cmpl-r-0-second", p_main=first.p_main, p_indexer=first.p_indexer
    )
    peer.metadata()
    peer.wire.receive_raw()
    for child in (first, second):
        decode.add(child)
        decode.expect(child)
        compute(prefill, decode, child)
        peer.run([child])
        decode.wait_reported(child, "done")
    decode.check()
    decode.check_baseline()


def test_legacy_name_and_blocks_used_again_after_an_abort(
    legacy: tuple[LegacyPrefill, Prefill, Decode, Prompts],
) -> None:
    peer, prefill, decode, prompts = legacy
    first = legacy_child(prompts, 4, "cmpl-r-0")
    second = replace(
        legacy_child(prompts, 4, "cmpl-r-0"), name="cmpl-r-0-second", p_main=first.p_main, p_indexer=first.p_indexer
    )
    peer.metadata()
    peer.wire.receive_raw()
    decode.add(first)
    compute(prefill, decode, first)
    peer.ready(0, [first], [], "7")
    peer.wire.receive_raw()
    decode.worker.call("abort", [first.name])
    decode.wait_reported(first, "aborted")
    decode.give_away(first, OTHER_OWNER)
    decode.add(second)
    decode.expect(second)
    compute(prefill, decode, second)
    peer.run([second])
    decode.wait_reported(second, "done")
    decode.check()
    decode.check_baseline()


def test_legacy_prefill_from_a_foreign_host_is_refused(take_worker: TakeWorker) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = Decode.start(take_worker(), SPEC)  # no legacy host is configured
    child = legacy_child(Prompts(SPEC), 4, "cmpl-f-0")
    decode.add(child)
    compute(prefill, decode, child)
    peer = LegacyPrefill(prefill, decode)
    peer.metadata()
    peer.ready(0, [child], [], "7")
    answer = msgpack.unpackb(peer.wire.receive_raw())
    assert answer[:2] == [b"read_failed", 0]
    assert len(answer) == 3
    peer.wire.close()
    decode.check()


def test_legacy_ratio_above_one_is_refused(legacy: tuple[LegacyPrefill, Prefill, Decode, Prompts]) -> None:
    peer, prefill, decode, prompts = legacy
    child = legacy_child(prompts, 4, "cmpl-t-0")
    decode.add(child)
    compute(prefill, decode, child)
    peer.metadata()
    peer.wire.receive_raw()
    peer.ready(0, [child], [], "7", (1, 2))
    assert b"ratio" in peer.wire.receive_raw()
    decode.check()


def test_second_legacy_contributor_is_refused(legacy: tuple[LegacyPrefill, Prefill, Decode, Prompts]) -> None:
    """Two ranks of a Prefill that does not say so: the second would write the same blocks again."""
    peer, prefill, decode, prompts = legacy
    child = legacy_child(prompts, 4, "cmpl-s-0")
    decode.add(child)
    decode.expect(child)
    compute(prefill, decode, child)
    second = LegacyPrefill(prefill, decode)
    for each in (peer, second):
        each.metadata()
        assert each.wire.receive_raw() == vector("ack")
    peer.ready(0, [child], [], "7")
    peer.wire.receive_raw()
    begun = decode.worker.call("reads")[0]
    second.ready(0, [child], [], "7")
    second.wire.receive_raw()
    assert decode.worker.call("reads")[0] == begun
    for layer in (1, 2):
        peer.ready(layer, [child], [child.external_id] if layer == 2 else [], "7")
        peer.wire.receive_raw()
    decode.wait_reported(child, "done")
    decode.check()
    second.wire.close()


# --- a legacy Decode against our Prefill ---


@pytest.fixture
def legacy_decode() -> Iterator[ScriptedDecode]:
    decode = ScriptedDecode(legacy=True)
    yield decode
    decode.close()


def read_as_legacy(payloads: list[bytes], meta: tuple[str, bytes], cache: Cache, child: Child) -> None:
    """Read what a ready message announces, the way a legacy Decode does: the id list of main, then of the indexer."""
    session, encoded = meta
    layers = decode_layer_map(encoded)
    engine = create_engine("host")
    engine.initialize(EngineRole.DECODE)
    engine.open_session(session)
    for payload in payloads:
        fields = msgpack.unpackb(payload)
        assert len(fields) == 7
        (request,) = decode_read_requests(msgpack.packb(fields[3], use_bin_type=True))
        assert request.request_id == child.external_id
        assert request.token is None
        begin = request.main_start - child.start
        local_main = np.array(child.d_main[begin : begin + len(request.main_blocks)], np.int64)
        local_indexer = np.array(child.d_indexer[begin : begin + len(request.indexer_blocks)], np.int64)
        plan = ChunkPlan(coalesce(request.main_blocks, local_main), coalesce(request.indexer_blocks, local_indexer))
        read = plan.descriptors(layers[fields[2]], cache.layout().layers[fields[1]])
        assert engine.batch_transfer_sync_read(session, read.local, read.peer, read.lengths).ok
    engine.close()


def test_legacy_decode_to_the_end(take_worker: TakeWorker, legacy_decode: ScriptedDecode) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    child = legacy_child(Prompts(SPEC), 7, "cmpl-l-0")
    cache = Cache(SPEC)
    first, second = parts(child, legacy_decode.address, 3)
    prefill.publish([first])
    prefill.publish([second])
    meta = legacy_decode.receive()
    raw_meta = msgpack.unpackb(legacy_decode.frames[0])
    assert len(raw_meta) == 3
    assert raw_meta[0] == b"mf_meta"
    legacy_decode.send(vector("ack"))
    # One message a layer is outstanding: the second chunk of a layer waits for the answer to its first.
    heads = [legacy_decode.ready() for _ in range(SPEC.layers)]
    assert [head.layer_idx for head in heads] == [0, 1, 2]
    assert legacy_decode.silent(0.2)
    for layer in range(SPEC.layers):
        legacy_decode.send(msgpack.packb((b"read_done", layer), use_bin_type=True))
        legacy_decode.send(msgpack.packb((b"read_done", layer + 10), use_bin_type=True))
    last = [legacy_decode.ready() for _ in range(SPEC.layers)]
    assert [head.done_ids for head in last] == [(), (), ("cmpl-l-0",)]
    read_as_legacy(legacy_decode.frames[1:], (meta.session, meta.encoded_layers), cache, child)
    assert prefill.worker.call("outstanding") == SPEC.layers
    for layer in range(SPEC.layers):
        legacy_decode.send(msgpack.packb((b"read_done", layer), use_bin_type=True))
    prefill.wait_settled()
    for layer in range(SPEC.layers):
        for i, (main, indexer) in enumerate(zip(child.d_main, child.d_indexer, strict=True)):
            assert cache.holds(layer, 0, Block(main, child.content, i))
            assert cache.holds(layer, 1, Block(main, child.content, i))
            assert cache.holds(layer, 2, Block(indexer, child.content, i))
    assert prefill.worker.call("alive")


def test_legacy_decode_that_fails_a_read(take_worker: TakeWorker, legacy_decode: ScriptedDecode) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    child = legacy_child(Prompts(SPEC), 4, "cmpl-l-0")
    prefill.publish(parts(child, legacy_decode.address))
    legacy_decode.receive()
    legacy_decode.send(vector("ack"))
    for layer in range(SPEC.layers):
        legacy_decode.ready()
        legacy_decode.send(msgpack.packb((b"read_failed", layer, "no"), use_bin_type=True))
    prefill.wait_settled()
    assert prefill.worker.call("overwrite", child.p_main) < 5.0


def test_idle_legacy_decode_costs_nothing(take_worker: TakeWorker, legacy_decode: ScriptedDecode) -> None:
    """A legacy Decode sends no heartbeat; its silence neither ends the connection nor keeps Prefill busy."""
    prefill = Prefill.start(take_worker(), SPEC, options=PublisherOptions(peer_timeout_s=0.3))
    child = legacy_child(Prompts(SPEC), 2, "cmpl-l-0")
    prefill.publish(parts(child, legacy_decode.address))
    legacy_decode.receive()
    legacy_decode.send(vector("ack"))
    for layer in range(SPEC.layers):
        legacy_decode.ready()
        legacy_decode.send(msgpack.packb((b"read_done", layer), use_bin_type=True))
    prefill.wait_settled()
    before = prefill.worker.call("cpu_s")
    stays("the connection stands", lambda: prefill.worker.call("alive"), 1.0)
    assert prefill.worker.call("cpu_s") - before < 0.5
    again = legacy_child(Prompts(SPEC), 2, "cmpl-l-1")
    prefill.publish(parts(again, legacy_decode.address))
    assert legacy_decode.ready().layer_idx == 0  # on the same connection, without new metadata
    wait_for("outstanding", lambda: prefill.worker.call("outstanding") == SPEC.layers)


def test_legacy_decode_that_hangs_is_given_up_by_the_age_of_its_messages(
    take_worker: TakeWorker, legacy_decode: ScriptedDecode
) -> None:
    """Without heartbeats only an answer shows that it lives; its connection standing means nothing."""
    options = PublisherOptions(peer_timeout_s=0.3, legacy_ack_timeout_s=1.0)
    prefill = Prefill.start(take_worker(), SPEC, options=options)
    child = legacy_child(Prompts(SPEC), 4, "cmpl-l-0")
    prefill.publish(parts(child, legacy_decode.address))
    legacy_decode.receive()
    legacy_decode.send(vector("ack"))
    heads = [legacy_decode.ready() for _ in range(SPEC.layers)]
    begin = time.monotonic()
    # All but one are answered; that it goes on answering does not hold the gate for ever.
    for head in heads[1:]:
        legacy_decode.send(msgpack.packb((b"read_done", head.layer_idx), use_bin_type=True))
    stays("the gate is shut", lambda: prefill.worker.call("outstanding") >= 1, 0.4)
    wait_for("the gate opens", lambda: prefill.worker.call("outstanding") == 0, 10)
    assert time.monotonic() - begin > 0.7
    # The next request makes a new connection.
    prefill.publish(parts(legacy_child(Prompts(SPEC), 2, "cmpl-l-1"), legacy_decode.address))
    legacy_decode.receive()
