"""Read planning: block ids of a chunk become coalesced descriptors, once for all layers of the chunk.

A *run* is a stretch of blocks that is contiguous on both sides. Runs depend on block ids only, byte offsets on block
sizes only, so a chunk's offsets are computed once for each distinct set of block sizes and every layer just adds its
base addresses. All addresses are 64-bit.
"""

from collections.abc import Sequence
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        columns = ((self.source, other.source), (self.local, other.local), (self.count, other.count))
        return all(np.array_equal(mine, theirs) for mine, theirs in columns)

    __hash__ = None  # type: ignore[assignment]

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

    @classmethod
    def joined(cls, parts: "Sequence[Descriptors]") -> "Descriptors":
        """Several reads from one peer as one."""
        if len(parts) == 1:
            return parts[0]
        local, peer, lengths, nbytes = zip(*parts, strict=True)
        return cls(np.concatenate(local), np.concatenate(peer), np.concatenate(lengths), sum(nbytes))


@dataclass(frozen=True, slots=True, eq=False)
class LayerPair:
    """One layer on both sides, prepared for all chunks: base addresses by tensor and block sizes."""

    bases: Addresses
    """uint64[2, t, 1]: local, then peer."""
    main_bytes: tuple[int, ...]
    indexer_bytes: tuple[int, ...]
    """Block bytes of indexer and scale, where present."""

    @classmethod
    def of(cls, source: LayerLayout, destination: LayerLayout) -> "LayerPair":
        """The two layouts have passed ``check_source``."""
        return cls(
            np.array([[[tensor.base_addr] for tensor in side.tensors] for side in (destination, source)], np.uint64),
            tuple(tensor.block_bytes for tensor in destination.main),
            tuple(tensor.block_bytes for tensor in destination.indexer_tensors),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tensors that are read by the same runs: byte offsets of run ``i`` in tensor ``j``."""

    tensors: slice
    """Positions in the layer."""
    addresses: Addresses
    """uint64[2, tensors, runs]: local, then peer."""

    @property
    def size(self) -> int:
        """Descriptors."""
        return int(self.addresses[0].size)


@dataclass(frozen=True, slots=True, eq=False)
class _Offsets:
    """All descriptors of a layer before its base addresses are added: tensor by tensor, in order."""

    parts: tuple[_Part, ...]
    lengths: Addresses
    nbytes: int

    def at(self, bases: Addresses) -> Addresses:
        """uint64[2, n] for a layer with these base addresses (uint64[2, t, 1])."""
        if len(self.parts) == 1:
            return (self.parts[0].addresses + bases).reshape(2, -1)
        return np.concatenate([(part.addresses + bases[:, part.tensors]).reshape(2, -1) for part in self.parts], axis=1)


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
        addresses = offsets.at(pair.bases)
        return Descriptors(addresses[0], addresses[1], offsets.lengths, offsets.nbytes)

    def _compute(self, pair: LayerPair) -> _Offsets:
        main, indexer = pair.main_bytes, pair.indexer_bytes
        if self.main is self.indexer:
            groups = [(self.main, 0, main + indexer)]
        else:
            groups = [(self.main, 0, main), (self.indexer, len(main), indexer)]
        parts, lengths = [], []
        for runs, begin, sizes in groups:
            if not sizes:
                continue
            block_bytes = np.array(sizes, np.int64)[:, None]
            addresses = np.stack((runs.local * block_bytes, runs.source * block_bytes)).astype(np.uint64)
            parts.append(_Part(slice(begin, begin + len(sizes)), addresses))
            lengths.append((runs.count * block_bytes).ravel())
        all_lengths = np.concatenate(lengths)
        return _Offsets(tuple(parts), all_lengths.astype(np.uint64), int(all_lengths.sum()))
