"""Prefill and Decode ranks in one process, with NumPy arrays as memory: what the pure core reads, byte by byte.

Only the core decides what moves where; this module plays the two engines, the sockets and the network.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rd2h.children import ChildSpec, ChildTable, Finished
from rd2h.decode.chunks import Chunk, Shares
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout, check_source, decode_layer_map, encode_layer_map
from rd2h.plan import Descriptors
from rd2h.topology import TpMapping
from rd2h.wire import ReadRequest, decode_from_prefill, decode_read_requests, encode_read_requests, encode_ready
from rd2h.wire.messages import ReadyHead

Bytes = NDArray[np.uint8]
CANARY = 0xCD
IDLE_S = 100.0
# (main block bytes, indexer block bytes or 0, scale block bytes or 0): sparse with scale, dense, sparse (MTP).
SHAPES: Sequence[tuple[tuple[int, ...], int, int]] = (((6, 2), 3, 1), ((5, 2), 0, 0), ((6, 2), 3, 0))
NUM_BLOCKS = 64


@dataclass(eq=False)
class Memory:
    """Memory of one rank: an array of ``NUM_BLOCKS`` blocks for each tensor of each layer, at made-up addresses."""

    base: int
    value: int
    arrays: list[tuple[int, Bytes]] = field(default_factory=list)
    writes: list[Bytes] = field(default_factory=list)
    layers: list[LayerLayout] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, (mains, indexer, scale) in enumerate(SHAPES):
            tensors = [self._tensor(size) for size in (*mains, indexer, scale) if size]
            extra = tensors[len(mains) :]
            name = f"model.layers.{number}.self_attn.attn"
            self.layers.append(LayerLayout(name, tuple(tensors[: len(mains)]), *extra))

    def _tensor(self, block_bytes: int) -> TensorLayout:
        size = block_bytes * NUM_BLOCKS
        self.arrays.append((self.base, np.full(size, self.value, np.uint8)))
        self.writes.append(np.zeros(size, np.uint8))
        tensor = TensorLayout(self.base, block_bytes, NUM_BLOCKS)
        self.base += size + 4096
        return tensor

    @property
    def layout(self) -> CacheLayout:
        """All layers."""
        return CacheLayout(tuple(self.layers))

    def find(self, address: int, length: int) -> tuple[int, slice]:
        """(array index, bytes in it) of a stretch of memory; IndexError for one that is not wholly in one tensor."""
        for index, (base, array) in enumerate(self.arrays):
            if base <= address and address + length <= base + len(array):
                return index, slice(address - base, address - base + length)
        raise IndexError(f"{address:#x}+{length} is not in this memory")

    def blocks(self, tensor: TensorLayout, of: Sequence[Bytes] | None = None) -> Bytes:
        """uint8[blocks, bytes] of one tensor: its bytes, or with ``of`` = ``writes`` how often each was written."""
        index, _ = self.find(tensor.base_addr, 1)
        array = self.arrays[index][1] if of is None else of[index]
        return array.reshape(NUM_BLOCKS, tensor.block_bytes)


def copy(descriptors: Descriptors, source: Memory, local: Memory) -> int:
    """What an engine does; returns the bytes moved."""
    moved = 0
    rows = zip(descriptors.local.tolist(), descriptors.peer.tolist(), descriptors.lengths.tolist(), strict=True)
    for to, at, length in rows:
        from_index, from_bytes = source.find(at, length)
        to_index, to_bytes = local.find(to, length)
        local.arrays[to_index][1][to_bytes] = source.arrays[from_index][1][from_bytes]
        local.writes[to_index][to_bytes] += 1
        moved += length
    return moved


@dataclass(eq=False)
class DecodeRank:
    """One Decode rank: its table, its memory, and main memory that may be shared with the other ranks."""

    d_rank: int
    d_tp: int
    table: ChildTable
    indexer_memory: Memory
    main_memory: Memory
    split_main: bool

    @property
    def layout(self) -> CacheLayout:
        """Main tensors from the pool, indexer tensors from this rank."""
        pairs = zip(self.main_memory.layers, self.indexer_memory.layers, strict=True)
        return CacheLayout(tuple(LayerLayout(m.name, m.main, i.indexer, i.scale) for m, i in pairs))


@dataclass(eq=False)
class PrefillRank:
    """One Prefill rank and its connection: which messages are still to come."""

    p_rank: int
    memory: Memory
    peer_layers: dict[str, LayerLayout]
    messages: list[bytes] = field(default_factory=list)
    chunks: dict[bytes, Chunk] = field(default_factory=dict)


@dataclass(eq=False)
class Prompt:
    """One child: prompt blocks, what Decode has cached, block ids on both sides, and where chunks begin."""

    number: int
    num_blocks: int
    main_start: int
    indexer_start: int
    source_main: NDArray[np.int64]
    source_indexer: NDArray[np.int64]
    local_main: NDArray[np.int64]
    local_indexer: NDArray[np.int64]
    cuts: Sequence[int]

    @property
    def token(self) -> bytes:
        """Token of this child."""
        return self.number.to_bytes(16, "big")

    def spec(self) -> ChildSpec:
        """Destination on every Decode rank."""
        return ChildSpec(
            self.token,
            f"r{self.number}",
            f"x{self.number}",
            self.local_main[self.main_start :],
            self.main_start,
            self.local_indexer[self.indexer_start :],
            self.indexer_start,
        )

    def chunk(self, begin: int, stop: int) -> ReadRequest:
        """What Prefill publishes of prompt blocks ``begin``..``stop``: complete lists, without what Decode has."""
        main, indexer = max(begin, self.main_start), max(begin, self.indexer_start)
        return ReadRequest(
            f"r{self.number}",
            self.source_main[main:stop],
            self.source_indexer[indexer:stop],
            min(main, stop),
            min(indexer, stop),
            self.token,
        )


class World:
    """All ranks of one Prefill and one Decode engine."""

    def __init__(self, p_tp: int, d_tp: int, split_main: bool, source: random.Random) -> None:
        self.mapping, self.random = TpMapping.of(p_tp, d_tp), source
        pool = Memory(0x7000_0000_0000, CANARY)
        self.decode = [
            DecodeRank(
                rank,
                d_tp,
                ChildTable(IDLE_S),
                Memory(0x1000_0000_0000 + (rank << 32), CANARY),
                pool if split_main else Memory(0x2000_0000_0000 + (rank << 32), CANARY),
                split_main,
            )
            for rank in range(d_tp)
        ]
        self.prefill = []
        for rank in range(p_tp):
            # Addresses beyond 2^63, and the same bytes on every rank: both caches are replicated on Prefill.
            memory = Memory((1 << 63) + (rank << 40), 0)
            filler = np.random.default_rng(5)
            for _, array in memory.arrays:
                array[:] = filler.integers(0, CANARY, len(array), np.uint8)
            self.prefill.append(PrefillRank(rank, memory, decode_layer_map(encode_layer_map(memory.layout))))
        self.bytes_moved = 0
        self.seq = 0
        self.finished: list[tuple[int, Finished]] = []

    def add(self, prompt: Prompt) -> None:
        """Decode knows the destination on every rank."""
        for rank in self.decode:
            rank.table.add(prompt.spec(), 0.0)

    def publish(self, prompts: Sequence[Prompt]) -> None:
        """Queue every message of every chunk on every Prefill rank; prompts share messages step by step."""
        for step in range(max(len(prompt.cuts) for prompt in prompts)):
            requests, done = [], []
            for prompt in prompts:
                if step < len(prompt.cuts):
                    begin = prompt.cuts[step - 1] if step else 0
                    requests.append(prompt.chunk(begin, prompt.cuts[step]))
                    if step == len(prompt.cuts) - 1:
                        done.append(prompt)
            raw = encode_read_requests(requests)
            for rank in self.prefill:
                for layer_idx, layer in enumerate(rank.memory.layers):
                    last = done if layer_idx == len(SHAPES) - 1 else []
                    self.seq += 1
                    rank.messages.append(
                        encode_ready(
                            layer_idx,
                            layer.name,
                            raw,
                            [f"r{prompt.number}" for prompt in last],
                            self.mapping.member(rank.p_rank),
                            self.mapping.ratio,
                            (1, self.seq, [prompt.token for prompt in last]),
                        )
                    )

    def run(self, at_step: "dict[int, list[bytes]] | None" = None) -> None:
        """Deliver all messages in any order of connections; before message number n the tokens of ``at_step`` abort."""
        step = 0
        while waiting := [rank for rank in self.prefill if rank.messages]:
            for token in (at_step or {}).get(step, []):
                self.abort(token)
            rank = self.random.choice(waiting)
            self.deliver(rank, rank.messages.pop(0))
            step += 1

    def abort(self, token: bytes) -> None:
        """vLLM no longer wants the child, on every rank; its blocks are overwritten by others once it is reported."""
        for rank in self.decode:
            child = rank.table.get(token)
            if child is not None:
                rank.table.abort(child.spec.request_id, 0.0)
        self.collect()

    def deliver(self, sender: PrefillRank, payload: bytes, fail: bool = False) -> None:
        """One message at its Decode rank, as the reading thread handles it; with ``fail`` the engine moves nothing."""
        head = decode_from_prefill(payload)
        if not isinstance(head, ReadyHead):
            raise TypeError(type(head))
        rank = self.decode[self.mapping.decode_rank(sender.p_rank)]
        layout = rank.layout
        chunk = sender.chunks.get(head.requests_raw)
        if chunk is None:
            shares = Shares(rank.d_rank, rank.d_tp, rank.split_main, head.member, head.ratio)
            key = (head.requests_raw, head.member, head.ratio)
            requests = decode_read_requests(head.requests_raw)
            chunk = Chunk(key, requests, shares, sender, layout.has_indexer, (1 << len(SHAPES)) - 1)
            sender.chunks[head.requests_raw] = chunk
        source, local = sender.peer_layers[head.layer_name], layout.layers[head.layer_idx]
        check_source(source, local)
        chunk.resolve(rank.table, lambda request: request.token)
        if chunk.plan is None:
            raise TypeError("no plan")
        descriptors = chunk.plan.descriptors(source, local)
        read = rank.table.begin_read(chunk.tokens)
        if fail:
            for token in chunk.tokens:
                rank.table.fail(token, "engine error", 0.0)
        else:
            self._move(descriptors, sender.memory, rank)
            chunk.started = True
            for token, hole in chunk.layer_read(head.layer_idx):
                rank.table.fail(token, hole, 0.0)
        rank.table.end_read(read, 0.0)
        if not fail:
            for token in head.done_tokens:
                rank.table.contributor_done(token, head.member, 0.0)
        self.collect()

    def _move(self, descriptors: Descriptors, source: Memory, rank: DecodeRank) -> None:
        for index in range(len(descriptors.local)):
            one = Descriptors(
                descriptors.local[index : index + 1],
                descriptors.peer[index : index + 1],
                descriptors.lengths[index : index + 1],
                0,
            )
            address = int(descriptors.local[index])
            owner = rank.main_memory if _holds(rank.main_memory, address) else rank.indexer_memory
            self.bytes_moved += copy(one, source, owner)

    def collect(self) -> None:
        """Take the reports of every rank."""
        for rank in self.decode:
            self.finished += [(rank.d_rank, report) for report in rank.table.take_finished()]


def _holds(memory: Memory, address: int) -> bool:
    return memory.arrays[0][0] <= address < memory.base
