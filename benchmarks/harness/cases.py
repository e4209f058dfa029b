"""What the hot-path benchmark moves: cases, block sizes, cache memory, request blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rd2h.gates import Component, Slot
from rd2h.layout import CacheLayout, LayerLayout, TensorLayout
from rd2h.wire import BlockIds

LAYERS = 61
TENSOR_BLOCK_BYTES = (131_072, 16_384, 16_384)
"""K and V of main, then the indexer."""
NUM_BLOCKS = 1024
BUFFER_SETS = 3
"""Layers share this many sets of buffers, so that 61 layers fit into half a GiB on either side."""

Buffer = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of chunk: ``requests`` requests of ``blocks`` blocks each, contiguous or random on both sides."""

    name: str
    requests: int
    blocks: int
    contiguous: bool

    def request_blocks(self, seed: int, turn: int) -> list[BlockIds]:
        """Block ids of every request (int64[blocks] each), disjoint; ``seed`` tells the two sides apart.

        Every ``turn`` has other blocks, so that no turn finds its bytes in a processor cache.
        """
        ids = np.arange(NUM_BLOCKS, dtype=np.int64)
        if self.contiguous:
            ids = np.roll(ids, -turn * self.requests * self.blocks % NUM_BLOCKS)
        else:
            ids = np.random.default_rng((seed, turn + 1)).permutation(ids)
        return [ids[index * self.blocks : (index + 1) * self.blocks] for index in range(self.requests)]


CASES = (Case("a", 1, 32, True), Case("b", 1, 512, False), Case("c", 16, 32, False))
PREFILL_SEED, DECODE_SEED = 1, 2


@dataclass(slots=True)
class CacheMemory:
    """The caches of one side. Layer ``i`` lies in buffer set ``i % BUFFER_SETS``."""

    buffers: list[list[Buffer]]

    @classmethod
    def allocate(cls) -> "CacheMemory":
        """Memory that is really there (every page written)."""
        return cls([[np.ones(NUM_BLOCKS * size, np.uint8) for size in TENSOR_BLOCK_BYTES] for _ in range(BUFFER_SETS)])

    def layout(self) -> CacheLayout:
        """The layout that Publisher and Puller work with."""
        layers = []
        for index in range(LAYERS):
            tensors = [
                TensorLayout(int(buffer.ctypes.data), size, NUM_BLOCKS)
                for buffer, size in zip(self.buffers[index % BUFFER_SETS], TENSOR_BLOCK_BYTES, strict=True)
            ]
            layers.append(LayerLayout(f"model.layers.{index}.self_attn.attn", tuple(tensors[:2]), tensors[2]))
        return CacheLayout(tuple(layers))

    def stamp(self) -> None:
        """Write a number into the first and last word of every block that no other block of the side has."""
        for index, words in enumerate(self._edges()):
            words[:] = _stamps(index)

    def unstamped(self, source: Sequence[BlockIds], local: Sequence[BlockIds]) -> int:
        """How many pulled blocks do not hold what Prefill stamped into their source block."""
        source_ids, local_ids = np.concatenate(source), np.concatenate(local)
        wrong = 0
        for index, words in enumerate(self._edges()):
            wrong += int(np.any(words[local_ids] != _stamps(index)[source_ids], axis=1).sum())
        return wrong

    def _edges(self) -> list[NDArray[np.uint64]]:
        """First and last word of every block: uint64[NUM_BLOCKS, 2] views, one a buffer."""
        return [
            buffer.view(np.uint64).reshape(NUM_BLOCKS, -1)[:, :: size // 8 - 1]
            for buffers in self.buffers
            for buffer, size in zip(buffers, TENSOR_BLOCK_BYTES, strict=True)
        ]


def _stamps(buffer_index: int) -> NDArray[np.uint64]:
    first = np.arange(NUM_BLOCKS, dtype=np.uint64) + np.uint64((buffer_index + 1) << 32)
    return np.stack((first, first + np.uint64(1 << 48)), axis=1)


def layer_slots() -> list[tuple[Slot, ...]]:
    """A slot of its own for every layer, as in an engine whose layers share no buffer."""
    return [(Slot(Component.MAIN, index), Slot(Component.INDEXER, index)) for index in range(LAYERS)]
