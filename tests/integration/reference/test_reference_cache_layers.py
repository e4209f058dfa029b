"""What vLLM is told about the caches, where they lie, and how memory is divided, with and without offload."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rd2h.caches import cache_layout, kv_dtype
from rd2h.errors import ConfigError, StateError
from rd2h.groups import infer_groups

BLOCK, BLOCKS = 16, 8
RANK, ROPE, DIM = 24, 8, 16
HOT_TOKENS, TOPK, MAX_SEQS = 64, 32, 4


def vllm_config(offload: dict[str, Any] | None = None, role: str | None = "kv_consumer", **parallel: int) -> Any:
    """The parts of vLLM's configuration that are read."""
    sizes = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "pipeline_parallel_size": 1}
    return SimpleNamespace(
        additional_config={} if offload is None else {"sparse_kv_offload_config": offload},
        cache_config=SimpleNamespace(block_size=BLOCK),
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_transfer_config=None if role is None else SimpleNamespace(kv_role=role),
        model_config=SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace(index_topk=TOPK)),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=MAX_SEQS),
    )


def enabled(**changes: Any) -> dict[str, Any]:
    return {"enabled": True, "topk_buffer_size": HOT_TOKENS, "dram_size_per_dp_GB": 1, **changes}


def add_layers(config: Any, int8: bool = False) -> list[Any]:
    """Two layers; the second one reuses the selection of the first."""
    from rd2h.reference.cache_layers import IndexerCacheLayer, MainCacheLayer

    names = [f"model.layers.{number}.self_attn" for number in range(2)]
    return [
        MainCacheLayer(f"{names[0]}.attn", f"{names[0]}.attn", RANK, ROPE, config),
        IndexerCacheLayer(f"{names[0]}.indexer.k_cache", DIM, int8, config),
        MainCacheLayer(f"{names[1]}.attn", f"{names[0]}.attn", RANK, ROPE, config),
    ]


@pytest.mark.parametrize("int8", [False, True])
def test_connector_finds_main_indexer_and_scale_in_the_registered_tuples(int8: bool) -> None:
    config = vllm_config()
    layers = add_layers(config, int8)
    caches = {layer.name: layer.allocate(BLOCKS, BLOCK, torch.float32) for layer in layers}
    layout = cache_layout(caches, BLOCKS, 2)
    first, second = layout.layers
    assert [tensor.block_bytes for tensor in first.main] == [BLOCK * RANK * 4, BLOCK * ROPE * 4]
    assert first.indexer is not None
    assert first.indexer.block_bytes == BLOCK * DIM * (1 if int8 else 4)
    assert (first.scale.block_bytes if first.scale else None) == (BLOCK * 2 if int8 else None)
    assert second.indexer is None
    assert kv_dtype(caches) == "float32"
    groups = infer_groups([list(caches)], [BLOCK])
    assert groups.main == groups.indexer == 0


@pytest.mark.parametrize("int8", [False, True])
def test_specs_count_the_bytes_that_are_allocated(int8: bool) -> None:
    config = vllm_config()
    for layer in add_layers(config, int8):
        tensors = layer.allocate(BLOCKS, BLOCK, torch.float32)
        allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert layer.get_kv_cache_spec(config).page_size_bytes * BLOCKS == allocated


def test_layers_of_both_kinds_land_in_one_group_of_vllm() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    config = vllm_config()
    specs = {layer.name: layer.get_kv_cache_spec(config) for layer in add_layers(config, int8=True)}
    assert UniformTypeKVCacheSpecs.from_specs(specs) is not None


@pytest.fixture
def manager() -> Iterator[tuple[Any, Any]]:
    """A manager over the layers of an offloading engine's configuration."""
    from rd2h.offload.manager import OffloadLayer, SparseKVOffloadManager
    from rd2h.offload.pool import HostPoolAllocator
    from rd2h.reference.cache_layers import MainCacheLayer
    from rd2h.reference.offloading import cache_layers, hot_rows, settings_of

    config = vllm_config(enabled())
    add_layers(config)
    mains = [layer for layer in cache_layers(config) if isinstance(layer, MainCacheLayer)]
    made = SparseKVOffloadManager(
        settings_of(config),
        [OffloadLayer(layer.name, layer.rank, layer.rope) for layer in mains],
        torch.float32,
        BLOCKS,
        BLOCK,
        hot_rows(config),
        TOPK,
        0,
        1,
        HostPoolAllocator(),
        lambda: None,
        register=False,
    )
    yield config, made
    made.close()


def test_offloaded_main_has_no_device_pages_and_a_hot_buffer_of_fixed_size(manager: tuple[Any, Any]) -> None:
    from rd2h.reference.backend import ResidentSparseBackend
    from rd2h.reference.cache_layers import MainCacheLayer
    from rd2h.reference.offloading import cache_layers

    config, offload = manager
    for index, layer in enumerate(each for each in cache_layers(config) if isinstance(each, MainCacheLayer)):
        assert layer.get_attn_backend() is ResidentSparseBackend
        with pytest.raises(StateError, match="no device pages"):
            layer.allocate(BLOCKS, BLOCK, torch.float32)
        k_device, v_device, k_pool, v_pool, k_hot, v_hot = layer.bind_pool(
            offload, offload.k_caches_cpu[index], offload.v_caches_cpu[index]
        )
        assert k_device is None
        assert v_device is None
        assert k_pool.data_ptr() == offload.gvas_k_bases[index]
        assert v_pool.data_ptr() == offload.gvas_v_bases[index]
        assert k_hot.shape == (MAX_SEQS, HOT_TOKENS, RANK)
        assert v_hot.shape == (MAX_SEQS, HOT_TOKENS, ROPE)


def test_ordinary_main_has_no_pool() -> None:
    main = add_layers(vllm_config())[0]
    with pytest.raises(StateError, match="not in a host pool"):
        main.bind_pool(None, None, None)


def test_block_budget_is_what_the_indexer_needs_after_the_hot_buffers() -> None:
    from rd2h.reference.offloading import budget_of, settings_of

    config = vllm_config(enabled())
    layers = add_layers(config)
    specs = {layer.name: layer.get_kv_cache_spec(config) for layer in layers}
    hot = 2 * MAX_SEQS * HOT_TOKENS * (RANK + ROPE) * 4
    indexer_page = BLOCK * DIM * 4
    budget = budget_of(settings_of(config), config, specs, hot + 1000 * indexer_page)
    assert budget.num_blocks == 1000
    # vLLM divides the total by all pages of a block and must find the same number.
    block = sum(spec.page_size_bytes for spec in specs.values())
    assert budget.total_bytes // block == 1000
    with pytest.raises(ConfigError, match="hot buffers need"):
        budget_of(settings_of(config), config, specs, hot)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (vllm_config(enabled(), role="kv_producer"), "kv_role='kv_producer'"),
        (vllm_config(enabled(), role=None), "kv_role='none'"),
        (vllm_config(enabled(topk_buffer_size=16)), "at least index_topk=32"),
        (vllm_config(enabled(topk_buffer_size=40)), "a multiple of block_size=16"),
        (vllm_config(enabled(keep_device_kv_cache=True)), "keep_device_kv_cache=True"),
        (vllm_config(enabled(), pipeline_parallel_size=2), "pipeline parallel size 2"),
        (vllm_config(enabled(), decode_context_parallel_size=2), "context parallel size 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_work_are_refused(config: Any, words: str) -> None:
    from rd2h.reference.offloading import settings_of

    with pytest.raises(ConfigError) as caught:
        settings_of(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_layers_of_one_name_are_refused() -> None:
    config = vllm_config()
    add_layers(config)
    with pytest.raises(ConfigError, match="two cache layers"):
        add_layers(config)
