"""Rows of a paged cache tensor [blocks, block size, width]: written by slot, read by logical position."""

import torch


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Store ``rows`` [tokens, width] at ``slots`` (int64[tokens]; negative ones are padding and not stored)."""
    real = slots >= 0
    cache.view(-1, cache.shape[-1])[slots[real]] = rows[real].to(cache.dtype)


def slots_of(positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of logical ``positions`` (int64[rows, n], all at least 0) under ``block_tables`` (int[rows, blocks])."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def rows_at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copies of the rows at ``slots`` (int64[...]) as [..., width]."""
    return cache.view(-1, cache.shape[-1])[slots]


def leading_rows(cache: torch.Tensor, block_table: torch.Tensor, count: int) -> torch.Tensor:
    """Copies of a request's first ``count`` rows [count, width]; ``block_table`` is int[blocks]."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-count // block_size)].long()
    return cache[blocks].view(-1, cache.shape[-1])[:count]
