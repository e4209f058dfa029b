"""Decode's destination over a manager's pool: ours, and one that has only the attributes of vllm-ascend's."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from offload_builders import BLOCK, BLOCKS, LAYERS, RANK, ROPE, make

from rd2h.caches import device_index, kv_dtype
from rd2h.errors import ConfigError, LayoutError
from rd2h.layout import TensorLayout
from rd2h.offload.destination import find_manager, offload_destination, offload_layout

INDEXERS = {
    name.replace("attn", "attn.indexer.k_cache"): (
        torch.zeros(BLOCKS, BLOCK, 8, dtype=torch.int8),
        torch.zeros(BLOCKS, BLOCK, 1, dtype=torch.float16),
    )
    for name in LAYERS[:2]
}


class ForeignManager:
    """The attributes that a connector reads, and nothing else."""

    def __init__(self, lengths=None):
        self.offload_layer_names = list(LAYERS)
        self.k_caches_cpu, self.v_caches_cpu = [], []
        self.gvas_k_bases = [0x1000_0000_0000 + layer * 0x1000_0000 for layer in range(3)]
        self.gvas_v_bases = [base + 0x800_0000 for base in self.gvas_k_bases]
        self.cpu_block_lens = [(1024, 128)] * 3 if lengths is None else lengths

    def _get_offload_layer_id(self, name):
        return {name: index for index, name in enumerate(self.offload_layer_names)}[name]


@pytest.fixture
def ours():
    manager = make(register=True)
    yield manager
    manager.close()


def test_main_lies_in_the_pool_and_indexers_on_the_device(ours):
    hot = {name: ours.hot_buffers(name) for name in LAYERS}
    layout = offload_layout(ours, {**hot, **INDEXERS}, BLOCKS, 3)
    assert [layer.name for layer in layout.layers] == list(LAYERS)
    for index, layer in enumerate(layout.layers):
        assert layer.main == (
            TensorLayout(ours.gvas_k_bases[index], BLOCK * RANK * 2, BLOCKS),
            TensorLayout(ours.gvas_v_bases[index], BLOCK * ROPE * 2, BLOCKS),
        )
    keys, scales = INDEXERS[LAYERS[1].replace("attn", "attn.indexer.k_cache")]
    assert layout.layers[1].indexer == TensorLayout(keys.data_ptr(), BLOCK * 8, BLOCKS)
    assert layout.layers[1].scale == TensorLayout(scales.data_ptr(), BLOCK * 2, BLOCKS)
    assert layout.layers[2].indexer is None
    destination = offload_destination(layout, 1, 2)
    assert (destination.d_rank, destination.d_tp, destination.split_main) == (1, 2, True)


@pytest.mark.parametrize(
    "lengths", [[(1024, 128)] * 3, [[1024, 128]] * 3, [1024, 128], torch.tensor([[1024, 128]] * 3)]
)
def test_a_foreign_manager_serves_through_its_attributes(lengths):
    layout = offload_layout(ForeignManager(lengths), INDEXERS, BLOCKS, 3)
    assert [tensor.block_bytes for tensor in layout.layers[2].main] == [1024, 128]
    assert layout.layers[2].main[1].base_addr == 0x1000_0000_0000 + 2 * 0x1000_0000 + 0x800_0000


@pytest.mark.parametrize("lengths", [[], [1024], [1024, 128, 1], [(1024,)] * 3, [(1024, 128)] * 2, [(1024, 0)] * 3])
def test_lengths_of_an_unknown_shape_are_refused(lengths):
    with pytest.raises(LayoutError):
        offload_layout(ForeignManager(lengths), INDEXERS, BLOCKS, 3)


def test_a_main_cache_that_is_not_offloaded_is_refused():
    with pytest.raises(LayoutError, match=r"'model.layers.7.attn' is registered, but the sparse offload manager"):
        offload_layout(ForeignManager(), {"model.layers.7.attn": torch.zeros(BLOCKS, 4)}, BLOCKS, 8)


@pytest.mark.parametrize("manager", ["ours", "foreign"])
def test_a_pool_for_fewer_blocks_than_the_engine_has_is_refused(manager, request):
    """Pulls into the last blocks of a layer would land in the rows of another one."""
    if manager == "ours":
        owner, blocks = request.getfixturevalue("ours"), 1 << 20
    else:
        owner, blocks = ForeignManager(), 0x800_0000 // 1024 + 1
        offload_layout(owner, {}, blocks - 1, 3)
    with pytest.raises(LayoutError, match=rf"attn' of {blocks} blocks overlaps .* made for fewer blocks"):
        offload_layout(owner, {}, blocks, 3)


def test_finds_ours(ours):
    assert find_manager() is ours


def test_finds_the_manager_of_the_other_package(monkeypatch):
    module, manager = ModuleType("vllm_ascend.somewhere.offload"), ForeignManager()
    module.get_sparse_kv_offload_manager = lambda: manager
    monkeypatch.setitem(sys.modules, "vllm_ascend.somewhere.offload", module)
    assert find_manager() is manager
    module.get_sparse_kv_offload_manager = lambda: SimpleNamespace(gvas_k_bases=[])
    with pytest.raises(ConfigError, match="has no offload_layer_names, gvas_v_bases, cpu_block_lens, _get_offload"):
        find_manager()


def test_says_so_when_there_is_none():
    with pytest.raises(ConfigError, match="this worker has no sparse offload manager"):
        find_manager()


def test_dtype_and_device_of_registered_tuples():
    other_rank = {"layer.0": (None, None, None, None, torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))}
    assert kv_dtype(other_rank) == "bfloat16"
    assert device_index(other_rank) == 0
    meta = SimpleNamespace(device=SimpleNamespace(type="npu", index=3))
    assert device_index({"layer.0": (None, None, torch.zeros(1), torch.zeros(1), meta, meta)}) == 3
