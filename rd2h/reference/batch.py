"""What the layers must know about a step's batch, built once a step from vLLM's common metadata."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SparseBatch:
    """Tokens of all scheduled requests, one request after the other; all tensors are on the CPU."""

    query_starts: torch.Tensor
    """int64[requests + 1]: request r's tokens are query_starts[r] up to query_starts[r + 1]."""
    seq_lens: torch.Tensor
    """int64[requests]: tokens of the request including this step's."""
    block_tables: torch.Tensor
    """int32[requests, max blocks]."""
    slots: torch.Tensor
    """int64[tokens]: where each token's cache rows go."""
    token_requests: torch.Tensor
    """int64[tokens]: the request of each token."""
    request_keys: torch.Tensor | None = None
    """uint64[requests] on an engine that offloads: who a request is, new for every admission; never 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step; the model's tensors may be padded beyond."""
        return len(self.token_requests)

    @property
    def computed(self) -> torch.Tensor:
        """int64[requests]: tokens computed before this step."""
        return self.seq_lens - self.query_starts.diff()

    @property
    def positions(self) -> torch.Tensor:
        """int64[tokens]: position of each token in its request."""
        offsets = torch.arange(self.num_tokens) - self.query_starts[:-1][self.token_requests]
        return self.computed[self.token_requests] + offsets

    @classmethod
    def of(
        cls,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        request_keys: torch.Tensor | None = None,
    ) -> "SparseBatch":
        """A batch from vLLM's tensors; requests without tokens (padding) are left out at the end."""
        starts = query_starts.to(torch.int64)
        tokens_each = starts.diff()
        requests = int((tokens_each > 0).sum())
        starts = starts[: requests + 1]
        tokens = int(starts[-1]) if requests else 0
        return cls(
            starts,
            seq_lens[:requests].to(torch.int64),
            block_tables[:requests],
            slots[:tokens],
            torch.repeat_interleave(torch.arange(requests), tokens_each[:requests]),
            None if request_keys is None else request_keys[:requests],
        )
