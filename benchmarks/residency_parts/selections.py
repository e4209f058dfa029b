"""Top-k selections of a decode step that share a given part with the step before."""

import numpy as np

from rd2h.offload.residency import Int64s


class SelectionStream:
    """One stream for each of several groups of layers; all rows of a group change at once."""

    def __init__(self, groups: int, rows: int, topk: int, positions: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._topk = topk
        start = np.broadcast_to(np.arange(positions, dtype=np.int32), (groups, rows, positions))
        self._order = self._rng.permuted(start, axis=2)

    def step(self, locality: float) -> list[Int64s]:
        """[rows, topk] positions for each group: ``locality`` of them as in the step before, the others not in it."""
        changed = round(self._topk * (1 - locality))
        groups, rows, positions = self._order.shape
        out, into = np.empty((groups, rows, changed), np.int64), np.empty((groups, rows, changed), np.int64)
        for group in range(groups):
            for row in range(rows):
                out[group, row] = self._rng.choice(self._topk, changed, replace=False)
                into[group, row] = self._rng.choice(positions - self._topk, changed, replace=False) + self._topk
        leaving = np.take_along_axis(self._order, out, 2)
        coming = np.take_along_axis(self._order, into, 2)
        np.put_along_axis(self._order, out, coming, 2)
        np.put_along_axis(self._order, into, leaving, 2)
        # An indexer hands its choice over in no order that helps.
        return [self._rng.permuted(group[:, : self._topk], axis=1).astype(np.int64) for group in self._order]
