"""The invariants that sparse offload rests on, each under its number; the details are tested elsewhere."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from offload_builders import (
    BLOCK,
    BLOCKS,
    LAYERS,
    RANK,
    ROPE,
    ROWS,
    TOPK,
    SharedPool,
    check_hot,
    fill,
    make,
    selection,
    settings,
)
from residency_world import World

from rd2h.errors import ConfigError
from rd2h.offload.copier import HostCopier
from rd2h.offload.destination import offload_layout
from rd2h.offload.manager import OffloadLayer

A, B, _ = LAYERS
ONE = (torch.ones(1, RANK, dtype=torch.bfloat16), torch.ones(1, ROPE, dtype=torch.bfloat16))


@pytest.mark.parametrize("capacity", [TOPK - 2, TOPK, TOPK + 1])
def test_i1_the_buffer_holds_a_selection_and_whole_blocks(capacity):
    with pytest.raises(ConfigError, match="topk_buffer_size"):
        make(config=settings(capacity))


class WritesWhileAnotherWaits(HostCopier):
    """Begins its first copy only when another rank waits at the barrier."""

    def __init__(self, barrier):
        super().__init__(None)
        self.barrier, self.met = barrier, False

    def copy(self, pairs, target_rows, source_rows):
        deadline = time.monotonic() + 5
        while not self.met and time.monotonic() < deadline:
            self.met = self.barrier.n_waiting == 1
            time.sleep(0.001)
        return super().copy(pairs, target_rows, source_rows)


@pytest.mark.parametrize("follows", [False, True])
def test_i2_a_rank_reads_only_what_rank_0_has_written(follows):
    barrier, shared = threading.Barrier(2, timeout=10), SharedPool()
    copier = WritesWhileAnotherWaits(barrier)
    chosen = selection(np.random.default_rng(0), keys=(1,))
    name = B if follows else A
    seen = []

    def run(rank):
        manager = make(
            tp_rank=rank, tp_size=2, allocator=shared, barrier=barrier.wait, copier=HostCopier(None) if rank else None
        )
        if follows:
            manager.gather(A, *chosen.arguments)
        if rank == 0:
            manager._copier = copier
        place = int(chosen.tables[0, chosen.topk[0, 0] // BLOCK]) * BLOCK + int(chosen.topk[0, 0]) % BLOCK
        manager.append(name, *ONE, torch.tensor([place]))
        slots = manager.reuse(B, A) if follows else manager.gather(A, *chosen.arguments)
        seen.append(manager.hot_buffers(name)[0][0, slots[0, 0]].clone())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert copier.met, "rank 1 read without waiting"
    assert len(seen) == 2
    assert all(torch.equal(row, ONE[0][0]) for row in seen)
    shared.pool.close()


def test_i3_a_resident_is_valid_for_its_request_and_below_the_stable_prefix():
    """The model behind the world compares every slot with the newest version of the row it stands for."""
    rng = random.Random(3)
    world = World()
    for _ in range(3):
        world.join(10, rng)
    for turn in range(200):
        if turn % 20 == 19:
            world.leave(world.requests[0])
            world.join(8, rng)
        rng.shuffle(world.requests)
        world.step(world.requests[: rng.randint(1, 3)], rng.randint(1, 2), 1, rng, look_up=turn % 3 != 0)
    assert world.rewrites > 50
    assert world.hits > 200


class Recorder(HostCopier):
    def __init__(self):
        super().__init__(None)
        self.targets = []

    def copy(self, pairs, target_rows, source_rows):
        self.targets.append(set(target_rows.tolist()))
        return super().copy(pairs, target_rows, source_rows)


def test_i4_what_counts_as_resident_has_been_copied_when_gather_returns():
    copier = Recorder()
    manager = make(copier=copier)
    stored, rng = fill(manager), np.random.default_rng(1)
    copier.targets.clear()
    tables, copied = selection(rng).tables, set()
    for _ in range(10):
        chosen = selection(rng)
        chosen.tables = tables
        slots = manager.gather(A, *chosen.arguments)
        copied |= copier.targets.pop()
        capacity = manager.config.topk_buffer_size
        assert {row * capacity + slot for row in range(ROWS) for slot in slots[row].tolist()} <= copied
        check_hot(manager, A, chosen, slots, stored)
    manager.close()


def test_i5_addresses_are_equal_on_all_ranks_and_layers_lie_at_equal_distances():
    """That ranks in processes of their own map the same addresses: test_two_processes_share_it_at_the_same_address."""
    shared = SharedPool()
    ranks = [make(tp_rank=rank, tp_size=2, allocator=shared) for rank in (0, 1)]
    assert ranks[0].gvas_k_bases == ranks[1].gvas_k_bases
    assert ranks[0].gvas_v_bases == ranks[1].gvas_v_bases
    assert ranks[0].cpu_block_lens == ranks[1].cpu_block_lens
    steps = set(np.diff(ranks[0].gvas_k_bases)) | set(np.diff(ranks[0].gvas_v_bases))
    assert len(steps) == 1
    assert all(base % (2 << 20) == 0 for base in ranks[0].gvas_k_bases + ranks[0].gvas_v_bases)
    shared.pool.close()


def test_i7_padded_and_dummy_rows_write_neither_pool_nor_buffer():
    manager = make()
    stored = fill(manager)
    chosen = selection(np.random.default_rng(2))
    slots = manager.gather(A, *chosen.arguments)
    pool, hot = manager.k_caches_cpu[0].clone(), manager.hot_buffers(A)[0].clone()
    dummy = selection(np.random.default_rng(3), keys=(0, 0, 0))
    dummy.tables.fill_(-1)
    rows = torch.ones(ROWS, RANK, dtype=torch.bfloat16), torch.ones(ROWS, ROPE, dtype=torch.bfloat16)
    manager.append(A, *rows, torch.full((ROWS,), -1))
    assert (manager.gather(A, *dummy.arguments) == -1).all()
    assert torch.equal(manager.k_caches_cpu[0], pool)
    assert torch.equal(manager.hot_buffers(A)[0], hot)
    misses = manager.stats()["misses"]
    assert torch.equal(manager.gather(A, *chosen.arguments), slots)
    assert manager.stats()["misses"] == misses
    check_hot(manager, A, chosen, slots, stored)
    manager.close()


def test_i8_pool_and_indexer_share_one_space_of_block_ids():
    manager = make(layers=[OffloadLayer(A, RANK, ROPE)])
    indexer = torch.zeros(BLOCKS, BLOCK, 8)
    layout = offload_layout(manager, {A + ".indexer": indexer}, BLOCKS, 1)
    tensors = layout.layers[0].tensors
    assert [tensor.num_blocks for tensor in tensors] == [BLOCKS] * 3
    last = BLOCKS - 1
    manager.append(A, *ONE, torch.tensor([last * BLOCK]))
    offset = tensors[0].base_addr + last * tensors[0].block_bytes - manager.gvas_k_bases[0]
    rows = manager.k_caches_cpu[0].view(-1).view(torch.uint8)[offset : offset + RANK * 2].view(torch.bfloat16)
    assert torch.equal(rows, ONE[0][0])
    assert tensors[2].base_addr + last * tensors[2].block_bytes == indexer[last].data_ptr()
    manager.close()
