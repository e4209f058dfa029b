"""Who a request is, for the residency of its rows: a key of 64 bits, new whenever vLLM schedules the request anew."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rd2h.errors import StateError
from rd2h.offload.residency import request_key


class RequestLives:
    """Keys of the scheduled requests. As bounded as the requests that the runner holds."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._lives = 0

    def begin(self, request_ids: Iterable[str]) -> None:
        """These requests start, or resume after a preemption: whatever was resident under their name is not theirs."""
        for request_id in request_ids:
            self._lives += 1
            self._keys[request_id] = request_key(request_id, self._lives)

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        for request_id in request_ids:
            self._keys.pop(request_id, None)

    def keys(self, request_ids: Sequence[str]) -> torch.Tensor:
        """uint64[requests]. Raises StateError for a request that never began."""
        missing = [request_id for request_id in request_ids if request_id not in self._keys]
        if missing:
            raise StateError(f"requests {missing[:4]} are in the batch but never began")
        return torch.from_numpy(np.array([self._keys[request_id] for request_id in request_ids], np.uint64))
