"""Multi-head latent attention over the selected tokens only."""

import torch


def attend(
    latent_queries: torch.Tensor,
    rope_queries: torch.Tensor,
    keys: torch.Tensor,
    ropes: torch.Tensor,
    present: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention output in latent space, float64[tokens, heads, rank].

    Args:
        latent_queries: float64[tokens, heads, rank], queries multiplied into latent space.
        rope_queries: float64[tokens, heads, rope].
        keys: [tokens, topk, rank], latents of the selected tokens; they are keys and values at once.
        ropes: [tokens, topk, rope], rotated key parts of the selected tokens.
        present: bool[tokens, topk]; what the others hold, even NaN, does not matter. At least one per token.
        scale: factor of the scores.
    """
    absent = ~present.unsqueeze(2)
    wide_keys = keys.to(torch.float64).masked_fill(absent, 0.0)
    wide_ropes = ropes.to(torch.float64).masked_fill(absent, 0.0)
    scores = torch.bmm(latent_queries, wide_keys.transpose(1, 2)) + torch.bmm(rope_queries, wide_ropes.transpose(1, 2))
    weights = torch.softmax((scores * scale).masked_fill(~present.unsqueeze(1), -torch.inf), dim=2)
    return torch.bmm(weights, wide_keys)
