"""The manager: new rows into the pool, selections into the hot buffer, errors, counters, life."""

import numpy as np
import pytest
import torch
from offload_builders import (
    BLOCK,
    BLOCKS,
    CAPACITY,
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

from rd2h.errors import ConfigError, EngineError, StateError, TransferError
from rd2h.offload.copier import HostCopier
from rd2h.offload.kernel import load_kernel
from rd2h.offload.manager import OffloadLayer, current_manager, get_sparse_kv_offload_manager
from rd2h.offload.pool import HostPoolAllocator

A, B, C = LAYERS


@pytest.fixture(params=["numpy", "kernel"], autouse=True)
def _kernel(request, monkeypatch):
    load_kernel.cache_clear()
    monkeypatch.setenv("RD2H_OFFLOAD_KERNEL", "off" if request.param == "numpy" else "required")
    yield
    load_kernel.cache_clear()


@pytest.fixture
def manager():
    made = make()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_selected_tokens_come_from_the_pool(dtype):
    manager = make(dtype=dtype)
    stored, rng = fill(manager), np.random.default_rng(1)
    tables = selection(rng).tables
    for _ in range(20):
        chosen = selection(rng, keys=tuple(rng.integers(0, 3, rng.integers(1, ROWS + 1)).tolist()))
        chosen.tables = tables[chosen.keys]
        chosen.topk[0, rng.integers(TOPK)] = -1
        for name in LAYERS:
            check_hot(manager, name, chosen, manager.gather(name, *chosen.arguments), stored)
    manager.close()


def test_the_pool_tensors_show_what_was_written(manager):
    stored = fill(manager)
    for index, name in enumerate(LAYERS):
        assert manager.k_caches_cpu[index].shape == (BLOCKS, BLOCK, 1, RANK)
        assert manager.v_caches_cpu[index].shape == (BLOCKS, BLOCK, 1, ROPE)
        assert torch.equal(manager.k_caches_cpu[index].view(-1, RANK), stored[name][0])
        assert torch.equal(manager.v_caches_cpu[index].view(-1, ROPE), stored[name][1])
        assert manager.k_caches_cpu[index].data_ptr() == manager.gvas_k_bases[index]
        assert manager.v_caches_cpu[index].data_ptr() == manager.gvas_v_bases[index]
        assert manager._get_offload_layer_id(name) == index
    assert manager.cpu_block_lens == [(BLOCK * RANK * 2, BLOCK * ROPE * 2)] * 3
    with pytest.raises(KeyError):
        manager._get_offload_layer_id("model.layers.9.attn")


def test_append_ignores_slots_outside_the_pool(manager):
    stored = fill(manager)
    before = manager.k_caches_cpu[0].clone()
    slots = torch.tensor([-1, BLOCKS * BLOCK, 2**40, -(2**40), 5])
    k, v = torch.ones(5, RANK, dtype=torch.bfloat16), torch.ones(5, ROPE, dtype=torch.bfloat16)
    manager.append(A, k, v, slots)
    before.view(-1, RANK)[5] = 1
    assert torch.equal(manager.k_caches_cpu[0], before)
    assert torch.equal(manager.k_caches_cpu[1].view(-1, RANK), stored[B][0])
    assert manager.stats()["rows_appended"] == 3 * BLOCKS * BLOCK + 1


def test_append_takes_slices_of_a_fused_tensor(manager):
    fused = torch.randn(3, RANK + ROPE).to(torch.bfloat16)
    manager.append(B, fused[:, :RANK], fused[:, RANK:], torch.tensor([7, 0, 3]))
    assert torch.equal(manager.k_caches_cpu[1].view(-1, RANK)[[7, 0, 3]], fused[:, :RANK])
    assert torch.equal(manager.v_caches_cpu[1].view(-1, ROPE)[[7, 0, 3]], fused[:, RANK:])


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (torch.ones(2, RANK), torch.ones(2, ROPE, dtype=torch.bfloat16), "new rows are torch.float32"),
        (torch.ones(2, RANK - 1, dtype=torch.bfloat16), torch.ones(2, ROPE, dtype=torch.bfloat16), "are 15 wide"),
        (torch.ones(1, RANK, dtype=torch.bfloat16), torch.ones(2, ROPE, dtype=torch.bfloat16), "for 2 slots"),
        (torch.ones(2, 1, RANK, dtype=torch.bfloat16), torch.ones(2, ROPE, dtype=torch.bfloat16), "for 2 slots"),
    ],
)
def test_append_checks_shapes_before_it_writes(manager, k, v, message):
    with pytest.raises(StateError, match=message):
        manager.append(A, k, v, torch.tensor([0, 1]))
    assert not manager.k_caches_cpu[0].any()
    assert not manager.v_caches_cpu[0].any()


def test_layers_that_follow_a_selection_copy_only_its_misses(manager):
    stored, rng = fill(manager), np.random.default_rng(2)
    tables = selection(rng).tables
    for _ in range(10):
        chosen = selection(rng)
        chosen.tables = tables
        slots = manager.gather(A, *chosen.arguments)
        before = manager.stats()["h2d_bytes"]
        for name in (B, C):
            assert torch.equal(manager.reuse(name, A), slots)
            check_hot(manager, name, chosen, slots, stored)
            assert torch.equal(manager.reuse(name, A), slots)
        assert manager.stats()["resyncs"] == 0
        copied = manager.stats()["h2d_bytes"] - before
    assert copied < 2 * ROWS * TOPK * (RANK + ROPE) * 2


def test_a_layer_that_skipped_steps_catches_up(manager):
    stored, rng = fill(manager), np.random.default_rng(3)
    tables = selection(rng).tables
    for _ in range(60):
        chosen = selection(rng)
        chosen.tables = tables
        slots = manager.gather(A, *chosen.arguments)
        for name in (B, C):
            dice = rng.random()
            if dice < 0.6:
                assert torch.equal(manager.reuse(name, A), slots)
                check_hot(manager, name, chosen, slots, stored)
            elif dice < 0.8:
                check_hot(manager, name, chosen, manager.gather(name, *chosen.arguments), stored)
        check_hot(manager, A, chosen, slots, stored)
    assert manager.stats()["resyncs"] > 5


def test_there_must_be_a_selection_to_reuse(manager):
    with pytest.raises(StateError, match="cannot reuse the selection"):
        manager.reuse(B, A)
    manager.gather(A, *selection(np.random.default_rng(0)).arguments)
    with pytest.raises(StateError, match="cannot reuse the selection"):
        manager.reuse(A, A)


class FailingCopier(HostCopier):
    fails = False

    def copy(self, pairs, target_rows, source_rows):
        if self.fails:
            raise TransferError("copy failed, ret=3", code=3)
        return super().copy(pairs, target_rows, source_rows)


def test_after_a_failed_copy_nothing_counts_as_resident():
    copier = FailingCopier(load_kernel())
    manager = make(copier=copier)
    stored, chosen = fill(manager), selection(np.random.default_rng(4))
    manager.gather(A, *chosen.arguments)
    manager.reuse(B, A)
    chosen.topk = chosen.topk.flip(1) // 2
    copier.fails = True
    with pytest.raises(TransferError):
        manager.gather(A, *chosen.arguments)
    with pytest.raises(StateError):
        manager.reuse(B, A)
    copier.fails = False
    misses = manager.stats()["misses"]
    check_hot(manager, A, chosen, manager.gather(A, *chosen.arguments), stored)
    check_hot(manager, B, chosen, manager.reuse(B, A), stored)
    assert manager.stats()["misses"] - misses == sum(len(set(row)) for row in chosen.topk.tolist())
    manager.close()


def test_a_failed_copy_of_a_following_layer_is_made_good():
    copier = FailingCopier(load_kernel())
    manager = make(copier=copier)
    stored, rng = fill(manager), np.random.default_rng(5)
    tables = selection(rng).tables
    for round_number in range(6):
        chosen = selection(rng)
        chosen.tables = tables
        slots = manager.gather(A, *chosen.arguments)
        if round_number == 3:
            copier.fails = True
            with pytest.raises(TransferError):
                manager.reuse(B, A)
            copier.fails = False
            continue
        assert torch.equal(manager.reuse(B, A), slots)
        check_hot(manager, A, chosen, slots, stored)
        check_hot(manager, B, chosen, slots, stored)
    manager.close()


def test_what_a_layer_holds_is_not_taken_for_a_selection_of_the_same_rank(manager):
    """A layer chooses as often as another has, takes over from that one in between: its followers notice."""
    stored, rng = fill(manager), np.random.default_rng(8)
    manager.gather(C, *selection(rng).arguments)
    for _ in range(2):
        manager.gather(A, *selection(rng).arguments)
        manager.reuse(B, A)
    manager.reuse(A, C)
    chosen = selection(rng)
    slots = manager.gather(A, *chosen.arguments)
    check_hot(manager, A, chosen, slots, stored)
    check_hot(manager, B, chosen, manager.reuse(B, A), stored)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_own_and_taken_selections_gives_the_rows_that_were_asked_for(seed):
    copier, rng = FailingCopier(load_kernel()), np.random.default_rng(seed)
    manager = make(copier=copier)
    stored, tables, latest, failures = fill(manager), selection(rng).tables, {}, 0
    for _ in range(400):
        name, source = rng.choice(LAYERS, 2).tolist()
        copier.fails = rng.random() < 0.1
        chosen = selection(rng)
        chosen.tables = tables
        owner = latest.get(source) if source != name else None
        try:
            if owner is None:
                latest.pop(name, None)
                if rng.random() < 0.05:
                    with pytest.raises(StateError):
                        manager.gather(name, chosen.topk[:, 1:], *chosen.arguments[1:])
                slots = manager.gather(name, *chosen.arguments)
                latest[name] = chosen
            else:
                latest.pop(name, None)
                chosen, slots = owner, manager.reuse(name, source)
        except TransferError:
            failures += 1
            continue
        check_hot(manager, name, chosen, slots, stored)
    assert failures > 5
    assert manager.stats()["resyncs"] > 20
    manager.close()


def test_positions_and_blocks_out_of_range_are_refused(manager):
    fill(manager)
    chosen = selection(np.random.default_rng(6))
    chosen.topk[1, 2] = 20
    with pytest.raises(StateError, match="row 1: position 20 is beyond its 20 positions"):
        manager.gather(A, *chosen.arguments)
    chosen.topk[1, 2] = 19
    chosen.tables[1, 4] = BLOCKS
    with pytest.raises(StateError, match=f"row 1: pool block {BLOCKS} is not one of the pool's {BLOCKS}"):
        manager.gather(A, *chosen.arguments)


def test_types_that_models_have(manager):
    stored, chosen = fill(manager), selection(np.random.default_rng(7))
    keys = np.array([2**64 - 1, 2**63, 5], np.uint64)
    first = manager.gather(A, chosen.topk.int(), keys, chosen.prefix.int(), chosen.tables.long())
    check_hot(manager, A, chosen, first, stored)
    signed = torch.from_numpy(keys.view(np.int64))
    assert torch.equal(manager.gather(A, chosen.topk.numpy(), signed, chosen.prefix, chosen.tables.numpy()), first)
    assert manager.stats()["hits"] == ROWS * TOPK


def test_counters_and_sizes(manager):
    fill(manager)
    chosen = selection(np.random.default_rng(8))
    manager.gather(A, *chosen.arguments)
    manager.gather(A, *chosen.arguments)
    stats, row = manager.stats(), (RANK + ROPE) * 2
    assert (stats["hits"], stats["misses"], stats["evictions"]) == (ROWS * TOPK, ROWS * TOPK, 0)
    assert stats["h2d_bytes"] == ROWS * TOPK * row
    assert stats["d2h_bytes"] == 3 * BLOCKS * BLOCK * row
    assert stats["h2d_seconds"] > 0
    assert stats["d2h_seconds"] > 0
    assert stats["hot_bytes"] == 3 * ROWS * CAPACITY * row
    assert stats["device_bytes_saved"] == 3 * BLOCKS * BLOCK * row - stats["hot_bytes"]
    assert 0 < stats["pool_touched_bytes"] <= stats["pool_bytes"]
    taken = manager.take_stats()
    assert taken["offload_misses"] == ROWS * TOPK
    assert taken["offload_pool_touched_bytes"] == stats["pool_touched_bytes"]
    assert taken["offload_pool_bytes"] == stats["pool_bytes"]
    assert taken["offload_hot_bytes"] == stats["hot_bytes"]
    assert manager.take_stats() == {}
    manager.gather(A, *chosen.arguments)
    assert manager.take_stats()["offload_hits"] == ROWS * TOPK


def test_every_counter_is_a_metric():
    from rd2h.offload.counters import OffloadCounters
    from rd2h.stats import FIELDS

    assert {f"offload_{name}" for name in OffloadCounters().values()} <= set(FIELDS)


def test_what_is_taken_is_known_to_the_metrics(manager):
    from rd2h.metrics import GAUGES
    from rd2h.stats import FIELDS

    fill(manager)
    manager.gather(A, *selection(np.random.default_rng(0)).arguments)
    assert set(manager.take_stats()) <= {*FIELDS, *GAUGES}


def test_one_manager_a_process():
    assert current_manager() is None
    with pytest.raises(StateError, match="no sparse offload manager"):
        get_sparse_kv_offload_manager()
    first = make(register=True)
    assert get_sparse_kv_offload_manager() is first
    with pytest.raises(StateError, match="has a sparse offload manager already"):
        make(register=True)
    first.close()
    first.close()
    second = make(register=True)
    assert get_sparse_kv_offload_manager() is second
    second.close()
    assert current_manager() is None


def test_a_closed_manager_says_so(manager):
    manager.close()
    with pytest.raises(StateError, match="the manager is closed"):
        manager.hot_buffers(A)
    assert manager.stats()["pool_touched_bytes"] == 0


def test_a_pool_larger_than_allowed_or_available_is_a_start_up_error():
    with pytest.raises(ConfigError) as raised:
        make(num_blocks=2**24, config=settings(dram_gib=1))
    needed = 3 * 2**24 * BLOCK * (RANK + ROPE) * 2
    assert f"main KV needs {needed} bytes" in str(raised.value)
    assert f"allowed are {2**30} bytes" in str(raised.value)
    with pytest.raises(ConfigError, match=r"the host pool needs 12582912 bytes .* this machine has 1000 bytes"):
        make(allocator=HostPoolAllocator(available_bytes=lambda: 1000))


@pytest.mark.parametrize("layers", [[], [OffloadLayer("a", 4, 4)] * 2])
def test_layers_must_be_some_and_different(layers):
    with pytest.raises(ConfigError, match="offload layers"):
        make(layers=layers)


def test_layers_of_different_widths():
    manager = make(layers=[OffloadLayer("a", 8, 2), OffloadLayer("b", 32, 6)])
    generator = torch.Generator().manual_seed(1)
    for name, rank, rope in (("a", 8, 2), ("b", 32, 6)):
        k = torch.randn(BLOCK, rank, generator=generator).to(torch.bfloat16)
        v = torch.randn(BLOCK, rope, generator=generator).to(torch.bfloat16)
        manager.append(name, k, v, torch.arange(BLOCK) + BLOCK * 3)
        topk = torch.tensor([[3, 2, 1, 0, -1, -1]])
        slots = manager.gather(name, topk, torch.tensor([9]), torch.tensor([4]), torch.tensor([[3]]))
        hot_k, hot_v = manager.hot_buffers(name)
        assert torch.equal(hot_k[0, slots[0, :4].long()], k.flip(0))
        assert torch.equal(hot_v[0, slots[0, :4].long()], v.flip(0))
    manager.close()


class RefusingAllocator:
    def allocate(self, num_bytes):
        raise EngineError(f"cannot share {num_bytes} bytes")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_pool_does_not_keep_the_others_waiting(rank):
    """They meet when all have the pool; vLLM hears of a failed rank only when those before it have answered."""
    met = []
    with pytest.raises(EngineError, match="cannot share"):
        make(tp_rank=rank, tp_size=2, allocator=RefusingAllocator(), barrier=lambda: met.append(rank))
    assert met == [rank]


def test_a_rank_without_a_kernel_does_not_keep_the_others_waiting(monkeypatch):
    def refuse():
        raise EngineError("the compiler took too long")

    monkeypatch.setattr("rd2h.offload.manager.load_kernel", refuse)
    met, shared = [], SharedPool()
    with pytest.raises(EngineError, match="took too long"):
        make(tp_rank=1, tp_size=2, allocator=shared, barrier=lambda: met.append(1))
    assert met == [1]
    shared.pool.close()


def test_other_ranks_write_nothing_and_wait_before_they_read():
    events, shared = [], SharedPool()
    owner = make(tp_size=2, allocator=shared)
    stored = fill(owner)
    other = make(tp_rank=1, tp_size=2, allocator=shared, barrier=lambda: events.append("barrier"))
    assert (other.k_caches_cpu, other.v_caches_cpu) == ([], [])
    assert other.gvas_k_bases == owner.gvas_k_bases
    assert other.gvas_v_bases == owner.gvas_v_bases
    events.clear()
    ones = torch.ones(1, RANK, dtype=torch.bfloat16), torch.ones(1, ROPE, dtype=torch.bfloat16)
    other.append(A, *ones, torch.tensor([0]))
    assert torch.equal(owner.k_caches_cpu[0].view(-1, RANK), stored[A][0])
    chosen = selection(np.random.default_rng(9))
    check_hot(other, A, chosen, other.gather(A, *chosen.arguments), stored)
    check_hot(other, B, chosen, other.reuse(B, A), stored)
    assert events == ["barrier", "barrier"]
    other.close()
    owner.close()
