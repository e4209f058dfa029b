"""Read planning: block ids of a chunk become coalesced descriptors, once for all layers of the chunk.

A *run* is a stretch of blocks that is contiguous on both sides. Runs depend on block ids only, byte offsets on block
sizes only, so a chunk's offsets are computed once for each distinct set of block sizes and every layer just adds its
base addresses. All addresses are 64-bit.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rd2h.layout import LayerLayout

Blocks = NDArray[np.int64]
Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Contiguous stretches: ``count[i]`` blocks from ``source[i]`` on Prefill to ``local[i]`` on Decode (int64[n])."""

    source: Blocks
    local: Blocks
    count: Blocks

    @property
    def blocks(self) -> int:
        """Blocks in all runs."""
        return int(self.count.sum())


EMPTY_RUNS = Runs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def coalesce(source: Blocks, local: Blocks) -> Runs:
    """Runs of paired block ids (int64[n] each), in order."""
    if source.size == 0:
        return EMPTY_RUNS
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(local) != 1)) + 1
    begins = np.concatenate((np.zeros(1, np.int64), breaks))
    counts = np.diff(np.concatenate((begins, np.array([source.size], np.int64))))
    return Runs(source[begins], local[begins], counts)


class Descriptors(NamedTuple):
    """One batched read: ``lengths[i]`` bytes from ``peer[i]`` to ``local[i]`` (uint64[n] each)."""

    local: Addresses
    peer: Addresses
    lengths: Addresses
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerPair:
    """One layer on both sides, prepared for all chunks: base addresses by tensor and block sizes."""

    bases: Addresses
    """uint64[2, t]: local, then peer."""
    main_bytes: tuple[int, ...]
    indexer_bytes: tuple[int, ...]
    """Block bytes of indexer and scale, where present."""

    @classmethod
    def of(cls, source: LayerLayout, destination: LayerLayout) -> "LayerPair":
        """The two layouts have passed ``check_source``."""
        return cls(
            np.array([[tensor.base_addr for tensor in side.tensors] for side in (destination, source)], np.uint64),
            tuple(tensor.block_bytes for tensor in destination.main),
            tuple(tensor.block_bytes for tensor in destination.indexer_tensors),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Offsets:
    addresses: Addresses
    """uint64[2, n]: local, then peer."""
    lengths: Addresses
    tensor_of: Blocks
    """Position of each descriptor's tensor in its layer (int64[n])."""
    nbytes: int


@dataclass(slots=True, eq=False)
class ChunkPlan:
    """Descriptors of one chunk for any layer; ``main`` and ``indexer`` hold the runs this rank itself pulls."""

    main: Runs
    indexer: Runs
    _offsets: dict[tuple[tuple[int, ...], tuple[int, ...]], _Offsets] = field(default_factory=dict)

    def descriptors(self, source: LayerLayout, destination: LayerLayout) -> Descriptors:
        """Descriptors of one layer; the two layouts have passed ``check_source``."""
        return self.of_pair(LayerPair.of(source, destination))

    def of_pair(self, pair: LayerPair) -> Descriptors:
        """Descriptors of one layer that was prepared before."""
        key = (pair.main_bytes, pair.indexer_bytes)
        offsets = self._offsets.get(key)
        if offsets is None:
            offsets = self._offsets[key] = self._compute(pair)
        local, peer = pair.bases.take(offsets.tensor_of, axis=1) + offsets.addresses
        return Descriptors(local, peer, offsets.lengths, offsets.nbytes)

    def _compute(self, pair: LayerPair) -> _Offsets:
        parts = [(self.main, size) for size in pair.main_bytes] + [(self.indexer, size) for size in pair.indexer_bytes]
        lengths = np.concatenate([runs.count * size for runs, size in parts])
        local = np.concatenate([runs.local * size for runs, size in parts])
        peer = np.concatenate([runs.source * size for runs, size in parts])
        return _Offsets(
            np.stack((local, peer)).astype(np.uint64),
            lengths.astype(np.uint64),
            np.repeat(np.arange(len(parts)), [len(runs.count) for runs, _ in parts]),
            int(lengths.sum()),
        )
