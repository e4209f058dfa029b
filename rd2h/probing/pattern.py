"""Reproducible bytes: both ends of a probe compute the same pattern, so that nothing but the read carries them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
CHUNK_BYTES = 4 << 20
"""Patterns are made and compared in pieces of this size, so that checking needs little memory."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def pattern_bytes(seed: int, start: int, length: int) -> NDArray[np.uint8]:
    """Bytes [start, start + length) of the endless pattern of `seed`; any two positions look unrelated."""
    first_word = start // WORD_BYTES
    last_word = -(-(start + length) // WORD_BYTES)
    words = np.arange(first_word, last_word, dtype=np.uint64)
    with np.errstate(over="ignore"):
        # The finaliser of SplitMix64: a bijective mix of the counter, wrapping at 64 bits by intention.
        words = (words + np.uint64(seed)) * _GOLDEN
        words = (words ^ (words >> np.uint64(30))) * _MIX_1
        words = (words ^ (words >> np.uint64(27))) * _MIX_2
        words ^= words >> np.uint64(31)
    skip = start - first_word * WORD_BYTES
    return words.astype("<u8").view(np.uint8)[skip : skip + length]


def chunks(length: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the pieces of a range of `length` bytes."""
    for start in range(0, length, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, length - start)
