"""Rotary position embedding."""

import torch


class Rotary:
    """Rotates ``dim`` features by angles that grow with the position; relative positions survive in dot products.

    Pairs of features are neighbours (``interleaved``, as MLA's queries and keys) or half a vector apart (as the
    indexer's).
    """

    def __init__(self, dim: int, theta: float, interleaved: bool) -> None:
        self._rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self._interleaved = interleaved

    def __call__(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated copy of ``features`` ([tokens, dim] or [tokens, heads, dim]) at ``positions`` (int64[tokens])."""
        angles = torch.outer(positions.to(torch.float64), self._rates.to(positions.device))
        if features.dim() == 3:
            angles = angles.unsqueeze(1)
        cosine, sine = angles.cos(), angles.sin()
        if self._interleaved:
            first, second = features[..., 0::2], features[..., 1::2]
        else:
            first, second = features.chunk(2, dim=-1)
        turned = (first * cosine - second * sine, first * sine + second * cosine)
        return torch.stack(turned, dim=-1).flatten(-2) if self._interleaved else torch.cat(turned, dim=-1)
