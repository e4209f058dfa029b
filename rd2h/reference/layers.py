"""Building blocks of the reference model; weights and activations are float64, sharded over TP ranks."""

from enum import Enum

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group

from rd2h.errors import ConfigError


class Shard(Enum):
    """Which axis of a projection's weight the tensor-parallel ranks share."""

    NONE = "none"
    OUTPUT = "output"
    INPUT = "input"


class Projection(nn.Module):
    """A bias-free linear map whose weight [out, in] may be sharded; sharded inputs are summed over the ranks."""

    def __init__(self, inputs: int, outputs: int, shard: Shard = Shard.NONE) -> None:
        super().__init__()
        self._shard = shard
        self._ranks = 1 if shard is Shard.NONE else get_tensor_model_parallel_world_size()
        shape = [outputs, inputs]
        if shard is not Shard.NONE:
            axis = self._axis
            if shape[axis] % self._ranks:
                raise ConfigError(f"a projection of {shape[axis]} features does not divide over {self._ranks} ranks")
            shape[axis] //= self._ranks
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float64), requires_grad=False)

    @property
    def _axis(self) -> int:
        return 0 if self._shard is Shard.OUTPUT else 1

    def load(self, weight: torch.Tensor) -> None:
        """Takes this rank's part of the whole weight."""
        if self._ranks > 1:
            weight = weight.chunk(self._ranks, dim=self._axis)[get_tensor_model_parallel_rank()]
        load(self.weight, weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        result = features @ self.weight.T
        if self._shard is Shard.INPUT and self._ranks > 1:
            # Not vLLM's own all-reduce: its CPU kernel knows no float64.
            torch.distributed.all_reduce(result, group=get_tp_group().cpu_group)
        return result


class RmsNorm(nn.Module):
    """Scales features to mean square 1, then by a weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self._epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64), requires_grad=False)

    def load(self, weight: torch.Tensor) -> None:
        """Takes the weight."""
        load(self.weight, weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Same shape as ``features``."""
        mean_square = features.square().mean(dim=-1, keepdim=True)
        return features * torch.rsqrt(mean_square + self._epsilon) * self.weight


class TokenEmbedding(nn.Module):
    """Vectors of token ids, the whole table on every rank.

    vLLM's own embedding compiles C++ in its first step under tensor parallelism, which takes a minute on two cores.
    """

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size, dtype=torch.float64), requires_grad=False)

    def load(self, weight: torch.Tensor) -> None:
        """Takes the table."""
        load(self.weight, weight)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """float64[tokens, size] of int[tokens]."""
        return nn.functional.embedding(input_ids, self.weight)


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden, inner, Shard.OUTPUT)
        self.up_proj = Projection(hidden, inner, Shard.OUTPUT)
        self.down_proj = Projection(inner, hidden, Shard.INPUT)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        gated = nn.functional.silu(self.gate_proj(features)) * self.up_proj(features)
        output: torch.Tensor = self.down_proj(gated)
        return output


def load(parameter: nn.Parameter, weight: torch.Tensor) -> None:
    """Copies a weight, whatever its precision. Raises ConfigError for another shape."""
    if parameter.shape != weight.shape:
        raise ConfigError(f"a weight of shape {tuple(weight.shape)} came where {tuple(parameter.shape)} is expected")
    parameter.data.copy_(weight)
