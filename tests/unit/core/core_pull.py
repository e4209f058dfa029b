"""One connection of one pull book, driven by hand."""

import secrets

import numpy as np

from rd2h.children import ChildSpec
from rd2h.decode.book import PullBook
from rd2h.decode.connection import Connection
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.router import Received
from rd2h.decode.steps import Answer, ReadEnd, ReadTask, Turn
from rd2h.engines import READ_OK, ReadResult
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, encode_layer_map
from rd2h.stats import TransferStats
from rd2h.wire import (
    PeerInfo,
    ReadRequest,
    decode_from_decode,
    encode_mf_meta,
    encode_pong,
    encode_read_requests,
    encode_ready,
)

GENERATION, PREFILL, PEER = 7, 9, b"peer"
LAYERS = 20


def layout(base: int, block_bytes: int) -> CacheLayout:
    span = 16 * block_bytes
    layers = [
        LayerLayout(f"l.{index}", (TensorLayout(base + index * span, block_bytes, 16),)) for index in range(LAYERS)
    ]
    return CacheLayout(tuple(layers))


class Pull:
    """One connection of one book, with one child of four blocks."""

    def __init__(self, block_bytes: int = 64, *, joint_acks: bool = False) -> None:
        self.local, self.source = layout(1 << 40, block_bytes), layout(1 << 30, block_bytes)
        options = PullerOptions("127.0.0.1", 0, GENERATION, b"", 1)
        self.book = PullBook(options, Destination(self.local, 0, 1, False), TransferStats())
        self.book.trust(frozenset({PREFILL}), 0.0)
        peer = PeerInfo(1, PREFILL, b"", 1, 0, joint_acks=joint_acks)
        meta = encode_mf_meta("session", encode_layer_map(self.source), peer)
        connection, _ = self.book.accept(Received(PEER, meta, "127.0.0.1"), 0.0, 0)
        assert connection is not None
        self.connection: Connection = connection
        self.step()
        self.book.session_opened(connection, 0, "")
        self.step()
        self.book.accept(Received(PEER, encode_pong(PREFILL, 0)), 0.0, 1)
        self.token = secrets.token_bytes(16)
        blocks = np.arange(4, dtype=np.int64)
        self.book.add([ChildSpec(self.token, "request", "request", blocks, 0, np.empty(0, np.int64), 0)], 0.0)
        self.requests = encode_read_requests(
            [ReadRequest("request", np.array([3, 4, 8, 9]), np.empty(0, np.int64), 0, 0, self.token)]
        )

    def ready(self, layer: int, *, name: str = "", requests: bytes | None = None, last: bool = False) -> None:
        done, tokens = (("request",), (self.token,)) if last else ((), ())
        payload = encode_ready(
            layer, name or f"l.{layer}", requests or self.requests, done, 0, 1, (GENERATION, 100 + layer, tokens)
        )
        self.book.accept(Received(PEER, payload), 0.0, 1)

    def step(self) -> ReadTask | Answer | None:
        return self.book.next_step(self.connection, 0.0, 1)

    def read(self) -> ReadTask:
        step = self.step()
        assert isinstance(step, ReadTask)
        return step

    def finish(self, task: ReadTask, result: ReadResult = READ_OK) -> list[object]:
        """End a read that kept the turn."""
        assert task.turn is Turn.KEPT
        return self.replies(self.book.finish_read(self.connection, task, ReadEnd(result, 0.0), 0.0, 1))

    def returned(self, task: ReadTask, result: ReadResult = READ_OK, seconds: float = 1.0) -> bool:
        """End a read that ran without the turn."""
        assert task.turn is not Turn.KEPT
        return self.book.read_returned(self.connection, task, ReadEnd(result, seconds))

    @staticmethod
    def replies(answer: ReadTask | Answer | None) -> list[object]:
        """What an answer says."""
        assert isinstance(answer, Answer)
        return [decode_from_decode(payload) for payload in answer.payloads]
