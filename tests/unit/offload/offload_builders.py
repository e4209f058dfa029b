"""Managers and steps for the tests."""

from dataclasses import dataclass

import numpy as np
import torch

from rd2h.offload.config import SparseOffloadConfig
from rd2h.offload.manager import OffloadLayer, SparseKVOffloadManager
from rd2h.offload.pool import HostPoolAllocator

BLOCK, BLOCKS, ROWS, TOPK, CAPACITY = 4, 20, 3, 6, 8
RANK, ROPE = 16, 4
LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")


def settings(capacity=CAPACITY, dram_gib=1):
    return SparseOffloadConfig(enabled=True, topk_buffer_size=capacity, dram_size_per_dp_gib=dram_gib)


def make(**changes):
    """A manager that is not the process's, unless ``register`` says so."""
    arguments = {
        "config": settings(),
        "layers": [OffloadLayer(name, RANK, ROPE) for name in LAYERS],
        "dtype": torch.bfloat16,
        "num_blocks": BLOCKS,
        "block_size": BLOCK,
        "max_rows": ROWS,
        "index_topk": TOPK,
        "tp_rank": 0,
        "tp_size": 1,
        "allocator": HostPoolAllocator(),
        "barrier": lambda: None,
        "register": False,
        **changes,
    }
    return SparseKVOffloadManager(**arguments)


@dataclass
class Selection:
    topk: torch.Tensor
    keys: torch.Tensor
    prefix: torch.Tensor
    tables: torch.Tensor

    @property
    def arguments(self):
        return self.topk, self.keys, self.prefix, self.tables


def selection(rng, keys=(1, 2, 3), positions=20, prefix=20):
    """A random question of one row a key."""
    rows = len(keys)
    return Selection(
        torch.from_numpy(np.stack([rng.permutation(positions)[:TOPK] for _ in range(rows)])),
        torch.tensor(keys),
        torch.full((rows,), prefix),
        torch.from_numpy(
            np.stack([rng.permutation(BLOCKS)[: positions // BLOCK] for _ in range(rows)]).astype(np.int32)
        ),
    )


def fill(manager, seed=0):
    """Random rows in the whole pool, through ``append``; returns {layer: (k, v)} by pool row."""
    generator = torch.Generator().manual_seed(seed)
    rows, stored = BLOCKS * BLOCK, {}
    for name in manager.offload_layer_names:
        k = torch.randn(rows, RANK, generator=generator).to(manager.dtype)
        v = torch.randn(rows, ROPE, generator=generator).to(manager.dtype)
        manager.append(name, k, v, torch.arange(rows))
        stored[name] = (k, v)
    return stored


def check_hot(manager, name, chosen, slots, stored):
    """Every selected token lies where ``slots`` says."""
    hot_k, hot_v = manager.hot_buffers(name)
    for row, key in enumerate(chosen.keys.tolist()):
        for token, slot in zip(chosen.topk[row].tolist(), slots[row].tolist(), strict=True):
            if key == 0 or token < 0:
                assert slot == -1
                continue
            place = int(chosen.tables[row, token // BLOCK]) * BLOCK + token % BLOCK
            assert torch.equal(hot_k[row, slot], stored[name][0][place]), (name, row, token)
            assert torch.equal(hot_v[row, slot], stored[name][1][place]), (name, row, token)


class SharedPool:
    """Gives every rank of one process the same memory; the first to close it gives it back."""

    def __init__(self, num_bytes=32 << 20):
        self.pool = HostPoolAllocator().allocate(num_bytes)

    def allocate(self, num_bytes):
        assert num_bytes <= self.pool.num_bytes
        return self.pool
