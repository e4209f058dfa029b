"""Attacks on Prefill by acknowledgements for several layers: each opens the gates it names rightly, and no other."""

import secrets
import threading
from collections.abc import Callable, Iterator

import pytest
from harness.scripted import ScriptedDecode
from harness.waiting import stays, wait_for

from rd2h.gates import ALL_BLOCKS, ChunkBlocks, Component, Slot
from rd2h.prefill.endpoint import EndpointChunk, EndpointKey
from rd2h.prefill.publisher import Publisher, PublisherOptions, SourceMemory
from rd2h.stats import TransferStats
from rd2h.wire import MAX_JOINT_ACKS, MfMeta, PeerInfo, ReadyHead, Refusal, encode_read_done, encode_read_failed

LAYERS = tuple(f"layer {index}" for index in range(6))
RING = 3


class Prefill:
    """A publisher whose layers share three buffers."""

    def __init__(self) -> None:
        slots = [(Slot(Component.MAIN, index % RING),) for index in range(len(LAYERS))]
        self.failures: list[Refusal] = []
        self.stats = TransferStats()
        memory = SourceMemory("session", b"\x80", LAYERS, slots, PeerInfo(1, 2, b"", 1, 0, joint_acks=True))
        self.slots = slots
        self.publisher = Publisher(memory, PublisherOptions(), self.stats, self.failures.extend)
        self.publisher.start()
        self._ignored = 0.0

    def publish(self, chunk: EndpointChunk, *layers: int) -> None:
        for layer in layers:
            self.publisher.publish(layer, [chunk], last_layer=layer == len(LAYERS) - 1)

    def shut(self, layer: int) -> bool:
        return self.publisher._book.gates.blocked(self.slots[layer], ALL_BLOCKS)

    def ignored(self) -> float:
        """Acknowledgements that belonged to nothing."""
        self._ignored += self.stats.take().get("acks_ignored", 0.0)
        return self._ignored


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    made = Prefill()
    yield made
    made.publisher.close()


@pytest.fixture
def decode() -> Iterator[ScriptedDecode]:
    with ScriptedDecode() as made:
        yield made


def chunk(decode: ScriptedDecode, *tokens: bytes) -> EndpointChunk:
    key = EndpointKey("127.0.0.1", decode.address.base_port, decode.address.generation)
    return EndpointChunk(key, b"\x90", ChunkBlocks(frozenset({1}), frozenset()), tokens, (), (), 0, 1)


def seq_of(head: ReadyHead) -> int:
    assert head.seq is not None
    return head.seq


def test_metadata_says_that_joint_acknowledgements_are_taken(prefill: Prefill, decode: ScriptedDecode) -> None:
    prefill.publish(chunk(decode), 0)
    meta = decode.handshake()
    assert isinstance(meta, MfMeta)
    assert meta.peer is not None
    assert meta.peer.joint_acks


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(lambda a, b, c: [(a[0], b[1])], id="another layer's number"),
        pytest.param(lambda a, b, c: [(b[0], c[1]), (c[0], b[1])], id="swapped"),
        pytest.param(lambda a, b, c: [a, a, a], id="itself again"),
        pytest.param(lambda a, b, c: [(b[0], b[1] + 1000), (b[0], (1 << 64) - 1)], id="never sent"),
        pytest.param(lambda a, b, c: [((1 << 64) - 1, b[1])], id="no such layer"),
    ],
)
def test_wrong_pairs_open_nothing(
    prefill: Prefill,
    decode: ScriptedDecode,
    pairs: Callable[[tuple[int, int], tuple[int, int], tuple[int, int]], list[tuple[int, int]]],
) -> None:
    prefill.publish(chunk(decode), 0, 1, 2)
    decode.handshake()
    heads = [decode.ready() for _ in range(3)]
    a, b, c = [(head.layer_idx, seq_of(head)) for head in heads]
    wrong = pairs(a, b, c)
    decode.send(encode_read_done(*a, also=wrong))
    wait_for("the wrong ones are counted", lambda: prefill.ignored() == len(wrong))
    assert [prefill.shut(layer) for layer in range(3)] == [False, True, True]
    decode.send(encode_read_done(*b, also=[c]))
    wait_for("all open", lambda: not prefill.publisher.outstanding())
    assert not prefill.failures


def test_a_joint_answer_of_another_decode_opens_nothing(prefill: Prefill, decode: ScriptedDecode) -> None:
    with ScriptedDecode() as other:
        prefill.publish(chunk(decode), 0, 1)
        decode.handshake()
        mine = [(head.layer_idx, seq_of(head)) for head in (decode.ready(), decode.ready())]
        prefill.publish(chunk(other), 0)
        other.handshake()
        theirs = other.ready()
        other.send(encode_read_done(theirs.layer_idx, theirs.seq, also=mine))
        wait_for("both are counted", lambda: prefill.ignored() == 2)
        assert prefill.publisher.outstanding() == 2
        assert prefill.shut(0)
        assert prefill.shut(1)


def test_a_writer_into_a_ring_waits_for_its_own_layer_of_a_joint_answer(
    prefill: Prefill, decode: ScriptedDecode
) -> None:
    """Layers 0 and 3 share a buffer: the answer for 3 does not say that 0 was read, in whatever company it comes."""
    prefill.publish(chunk(decode), 0, 1, 2)
    decode.handshake()
    heads = [decode.ready() for _ in range(3)]
    writer = threading.Thread(target=prefill.publisher.wait_writable, args=(prefill.slots[3], ALL_BLOCKS), daemon=True)
    writer.start()
    decode.send(encode_read_done(1, heads[1].seq, also=[(2, seq_of(heads[2])), (3, seq_of(heads[0]))]))
    wait_for("only layer 0 is open", lambda: prefill.publisher.outstanding() == 1)
    stays("the writer waits", writer.is_alive, 0.3)
    decode.done(heads[0])
    writer.join(5)
    assert not writer.is_alive()


def test_layers_that_were_not_sent_yet_cannot_be_acknowledged(prefill: Prefill, decode: ScriptedDecode) -> None:
    """Sequence numbers are easily guessed: those of messages in the queue, and those to come."""
    prefill.publish(chunk(decode), 0, 1)
    meta = decode.receive()
    assert isinstance(meta, MfMeta)
    decode.send(encode_read_done(0, 1, also=[(1, 2), (2, 3)]))  # before the handshake has ended
    wait_for("all are counted", lambda: prefill.ignored() == 3)
    assert prefill.publisher.outstanding() == 2


def test_refusals_of_a_joint_answer_concern_every_layer_once(prefill: Prefill, decode: ScriptedDecode) -> None:
    mine, other, foreign = (secrets.token_bytes(16) for _ in range(3))
    prefill.publish(chunk(decode, mine, other), 0, 1)
    decode.handshake()
    heads = [decode.ready(), decode.ready()]
    refused = [Refusal(mine, "gone"), Refusal(foreign, "gone")]
    decode.send(encode_read_done(0, heads[0].seq, refused, [(1, seq_of(heads[1]))]))
    wait_for("all open", lambda: not prefill.publisher.outstanding())
    wait_for("the refusal is handed out", lambda: prefill.failures)
    assert prefill.failures == [Refusal(mine, "gone")]


def test_a_failure_after_a_joint_answer_for_the_same_layer_is_stale(prefill: Prefill, decode: ScriptedDecode) -> None:
    prefill.publish(chunk(decode, secrets.token_bytes(16)), 0, 1)
    decode.handshake()
    heads = [decode.ready(), decode.ready()]
    decode.send(encode_read_done(0, heads[0].seq, also=[(1, seq_of(heads[1]))]))
    decode.send(encode_read_failed(1, "too late", seq_of(heads[1])))
    wait_for("it is counted", lambda: prefill.ignored() == 1)
    assert not prefill.failures


def test_more_pairs_than_allowed_are_malformed_and_open_nothing(prefill: Prefill, decode: ScriptedDecode) -> None:
    prefill.publish(chunk(decode), 0)
    decode.handshake()
    head = decode.ready()
    decode.send(encode_read_done(0, head.seq, also=[(0, seq_of(head))] * (MAX_JOINT_ACKS + 1)))
    stays("the gate is shut", lambda: prefill.shut(0), 0.3)
    decode.send(encode_read_done(0, head.seq, also=[(9, 9)] * MAX_JOINT_ACKS))
    wait_for("the gate opens", lambda: not prefill.publisher.outstanding())


@pytest.mark.parametrize("how", ["alone", "jointly"])
def test_a_legacy_decode_acknowledges_nothing_but_what_is_outstanding(prefill: Prefill, how: str) -> None:
    """It has no numbers, so a second answer for a layer could be taken for that of the next chunk."""
    with ScriptedDecode(legacy=True) as decode:
        prefill.publish(chunk(decode), 0, 1)
        decode.handshake()
        decode.ready()
        decode.ready()
        prefill.publish(chunk(decode), 0)  # waits for the first answer about layer 0
        if how == "alone":
            decode.send(encode_read_done(0, None))
        else:
            # No legacy Decode says this; one that does gets nothing from it but what the first two positions say.
            decode.send(encode_read_done(0, 77, also=[(0, 1), (0, 3), (1, 2)]))
        decode.ready()
        stays("layer 1 and the second chunk wait", lambda: prefill.publisher.outstanding() == 2, 0.3)
