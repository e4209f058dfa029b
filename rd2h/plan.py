"""Read planning: block ids of a chunk become coalesced descriptors, once for all layers of the chunk.

A *run* is a stretch of blocks that is contiguous on both sides. Runs depend on block ids only, byte offsets on block
sizes only, so a chunk's offsets are computed once for each distinct set of block sizes and every layer just adds its
base addresses. All addresses are 64-bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rd2h.layout import LayerLayout, TensorLayout

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


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """One batched read: ``lengths[i]`` bytes from ``peer[i]`` to ``local[i]`` (uint64[n] each)."""

    local: Addresses
    peer: Addresses
    lengths: Addresses
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Offsets:
    local: Addresses
    peer: Addresses
    lengths: Addresses
    descriptors_per_tensor: Sequence[int]
    nbytes: int


@dataclass(slots=True, eq=False)
class ChunkPlan:
    """Descriptors of one chunk for any layer; ``main`` and ``indexer`` hold the runs this rank itself pulls."""

    main: Runs
    indexer: Runs
    _offsets: dict[tuple[int, ...], _Offsets] = field(default_factory=dict)

    def descriptors(self, source: LayerLayout, destination: LayerLayout) -> Descriptors:
        """Descriptors of one layer; the two layouts have passed ``check_source``."""
        key = (len(destination.main), *(tensor.block_bytes for tensor in destination.tensors))
        offsets = self._offsets.get(key)
        if offsets is None:
            offsets = self._offsets[key] = self._compute(destination)
        counts = offsets.descriptors_per_tensor
        return Descriptors(
            offsets.local + _bases(destination.tensors, counts),
            offsets.peer + _bases(source.tensors, counts),
            offsets.lengths,
            offsets.nbytes,
        )

    def _compute(self, layer: LayerLayout) -> _Offsets:
        parts = [(self.main, tensor) for tensor in layer.main] + [(self.indexer, t) for t in layer.indexer_tensors]
        local = np.concatenate([runs.local * tensor.block_bytes for runs, tensor in parts])
        peer = np.concatenate([runs.source * tensor.block_bytes for runs, tensor in parts])
        lengths = np.concatenate([runs.count * tensor.block_bytes for runs, tensor in parts])
        return _Offsets(
            local.astype(np.uint64),
            peer.astype(np.uint64),
            lengths.astype(np.uint64),
            [len(runs.count) for runs, _ in parts],
            int(lengths.sum()),
        )


def _bases(tensors: Sequence[TensorLayout], counts: Sequence[int]) -> Addresses:
    return np.repeat(np.array([tensor.base_addr for tensor in tensors], np.uint64), counts)
