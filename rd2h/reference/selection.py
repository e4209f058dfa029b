"""The lightning indexer's arithmetic: scores of earlier tokens, and the top-k of them.

Score of token s for token t: the sum over index heads of weight[t, head] * relu(query[t, head] . key[s]).
"""

import torch

ABSENT = -1
_INT8_MAX = 127


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [tokens, keys] from queries [tokens, heads, dim], weights [tokens, heads] and keys [keys, dim]."""
    similarity = torch.einsum("thd,sd->ths", queries, keys).relu_()
    return torch.einsum("th,ths->ts", weights, similarity)


def select_topk(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> torch.Tensor:
    """The ``topk`` best tokens at or before each token: int64[tokens, topk], ascending, then ABSENT.

    ``scores[t, s]`` belongs to the token at position s; ``positions[t]`` is t's own. Equal scores (relu makes many
    zeros) are settled by position, so that every engine selects the same.
    """
    candidates = torch.arange(scores.shape[1], device=scores.device)
    future = candidates > positions.unsqueeze(1)
    ranked = torch.sort(scores.masked_fill(future, -torch.inf), dim=1, descending=True, stable=True).indices[:, :topk]
    # Future tokens come after all others; where fewer than topk are left they would be chosen.
    beyond = ranked > positions.unsqueeze(1)
    chosen = torch.sort(ranked.masked_fill(beyond, scores.shape[1]), dim=1).values
    chosen = chosen.masked_fill(chosen == scores.shape[1], ABSENT)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=ABSENT)


def quantize(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 keys [tokens, dim] and float16 scales [tokens, 1]; the largest feature of a token becomes 127."""
    scales = (keys.abs().amax(dim=1, keepdim=True) / _INT8_MAX).clamp_min(torch.finfo(torch.float16).tiny)
    scales = scales.to(torch.float16)
    steps = torch.round(keys / scales.to(keys.dtype)).clamp_(-_INT8_MAX, _INT8_MAX)
    return steps.to(torch.int8), scales


def dequantize(keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 keys from ``quantize``."""
    return keys.to(torch.float64) * scales.to(torch.float64)
