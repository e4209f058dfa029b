"""vLLM's objects as plain values, in the shapes of 0.32 and of 0.26; cache groups; trust in registered engines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rd2h_client.v1 import engine_registry_pb2 as registry

from rd2h import vllm_compat
from rd2h.caches import cache_layout, kv_dtype, layer_slots, storage_regions, tensor_layout
from rd2h.control import DecodeAddress
from rd2h.errors import LayoutError
from rd2h.groups import CacheGroups, infer_groups
from rd2h.meta_link import RegistryTrust
from rd2h.vllm_compat import BlockTables, ScheduledRequest, parallel_sizes, scheduled_requests, served_model


def new(request_id: str, computed: int, tokens: Any = (1, 2, 3), embeds: Any = None) -> Any:
    ids = list(tokens) if tokens is not None else None
    return SimpleNamespace(
        req_id=request_id, num_computed_tokens=computed, block_ids=([1],), prompt_token_ids=ids, prompt_embeds=embeds
    )


def cached(style: str, resumed: set[str]) -> Any:
    ids = ["a", "b", "c"]
    marks: dict[str, Any] = {
        "0.32": {"resumed_req_ids": resumed},
        "0.26": {"resumed_from_preemption": [request_id in resumed for request_id in ids]},
    }[style]
    return SimpleNamespace(
        req_ids=ids, num_computed_tokens=[10, 20, 30], new_block_ids=[([7],), None, ([8, 9],)], **marks
    )


@pytest.mark.parametrize("style", ["0.32", "0.26"])
def test_scheduled_requests(style: str) -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[new("n", 4), new("e", 0, None, torch.zeros(5, 2)), new("m", 0, None, None)],
        scheduled_cached_reqs=cached(style, {"c"}),
        num_scheduled_tokens={"n": 2, "e": 5, "m": 1, "a": 1, "b": 2, "c": 3},
    )
    assert scheduled_requests(output) == [
        ScheduledRequest("n", 4, 2, ([1],), True, 3),
        ScheduledRequest("e", 0, 5, ([1],), True, 5),
        ScheduledRequest("m", 0, 1, ([1],), True, 0),
        ScheduledRequest("a", 10, 1, ([7],), False),
        ScheduledRequest("b", 20, 2, None, False),
        ScheduledRequest("c", 30, 3, ([8, 9],), True),
    ]


def test_block_tables_follow_a_life() -> None:
    tables = BlockTables()
    assert tables.update(ScheduledRequest("a", 0, 1, ([1], [5]), True)) == ([1], [5])
    assert tables.update(ScheduledRequest("a", 1, 1, None, False)) == ([1], [5])
    assert tables.update(ScheduledRequest("a", 2, 1, ([2, 3], [6]), False)) == ([1, 2, 3], [5, 6])
    assert tables.update(ScheduledRequest("a", 0, 1, ([9], [8]), True)) == ([9], [8])
    tables.forget(["a", "never seen"])
    with pytest.raises(KeyError):
        tables.update(ScheduledRequest("a", 0, 1, None, False))


def test_block_tables_are_their_own() -> None:
    """vLLM goes on using its lists."""
    tables, theirs = BlockTables(), [1]
    tables.update(ScheduledRequest("a", 0, 1, (theirs,), True))
    theirs.append(99)
    assert tables.update(ScheduledRequest("a", 1, 1, None, False)) == ([1],)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"data_parallel_index": 3, "data_parallel_rank": 0}, (3, 1)),
        ({"data_parallel_rank": 2}, (2, 1)),
        ({"data_parallel_rank": 0, "decode_context_parallel_size": 2}, (0, 2)),
        ({"data_parallel_rank": 0, "decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}, (0, 4)),
    ],
)
def test_parallel_sizes(parallel: dict[str, int], expected: tuple[int, int]) -> None:
    """The data-parallel rank is the global one, where a version has it."""
    common = {"tensor_parallel_size": 4, "data_parallel_size": 2, "pipeline_parallel_size": 1}
    sizes = parallel_sizes(SimpleNamespace(parallel_config=SimpleNamespace(**common, **parallel)))
    assert (sizes.tp_size, sizes.dp_size, sizes.pp_size) == (4, 2, 1)
    assert (sizes.dp_rank, sizes.cp_size) == expected


@pytest.mark.parametrize(
    ("served", "name"), [("n", "n"), (["a", "b"], "a"), (None, "/m/path"), ([], "/m/path"), ("", "/m/path")]
)
def test_served_model(served: Any, name: str) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name=served, model="/m/path"))
    assert served_model(config) == name


def test_blocks_of_members_without_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = SimpleNamespace(new_empty=lambda: "empty")
    assert vllm_compat.blocks_without_load(blocks) is blocks
    monkeypatch.setattr(vllm_compat, "HAS_TRANSFER_RESULTS", False)
    assert vllm_compat.blocks_without_load(blocks) == "empty"


def test_transfer_results_are_vllms_own() -> None:
    results = vllm_compat.transfer_results({"a", "b"}, {"b"})
    assert (results.finished_recving, results.failed_recving, results.finished_sending) == ({"a", "b"}, {"b"}, set())


# --- cache groups and registered caches ---


def test_groups_in_any_order() -> None:
    main, indexer = ["l.0.attn", "l.1.attn"], ["l.0.indexer.k_cache"]
    assert infer_groups([main], [16]) == CacheGroups(0, 0, 16)
    assert infer_groups([main, indexer], [16, 16]) == CacheGroups(0, 1, 16)
    assert infer_groups([indexer, main], [16, 16]) == CacheGroups(1, 0, 16)
    assert infer_groups([[*main, *indexer]], [128]) == CacheGroups(0, 0, 128)
    assert infer_groups([indexer, main], [16, 16]).ids(([5], [7])) == ([7], [5])


@pytest.mark.parametrize(
    ("names", "sizes"),
    [([], []), ([["a"], ["b"]], [16, 16]), ([["l.indexer"]], [16]), ([["a"], ["x.indexer"], ["y.indexer"]], [16] * 3)],
)
def test_groups_that_cannot_be_told_apart(names: list[list[str]], sizes: list[int]) -> None:
    with pytest.raises(LayoutError, match="expected one KV cache group with main layers"):
        infer_groups(names, sizes)


def test_groups_with_unequal_blocks() -> None:
    with pytest.raises(LayoutError, match="blocks of 16 tokens, the indexer of 32"):
        infer_groups([["a"], ["x.indexer"]], [16, 32])


def test_tensor_must_divide_into_blocks() -> None:
    assert tensor_layout("l", torch.zeros(8, 16, 4), 8).block_bytes == 256
    assert tensor_layout("l", torch.zeros(16, 8, 4), 8).block_bytes == 256
    with pytest.raises(LayoutError, match="does not divide into 3 blocks"):
        tensor_layout("l", torch.zeros(8, 16, 4), 3)
    with pytest.raises(LayoutError, match="is not contiguous"):
        tensor_layout("l", torch.zeros(8, 16, 4).transpose(0, 1), 8)
    with pytest.raises(LayoutError, match="does not divide into 0 blocks"):
        tensor_layout("l", torch.zeros(8, 16, 4), 0)


def test_caches_of_one_tensor_of_pairs_and_with_indexers() -> None:
    dense = cache_layout({"l.0": torch.zeros(8, 4), "l.1": torch.zeros(8, 4)}, 8, 2)
    assert [len(layer.main) for layer in dense.layers] == [1, 1]
    pair = cache_layout({"l.0": (torch.zeros(8, 4), torch.zeros(8, 2))}, 8, 1)
    assert [tensor.block_bytes for tensor in pair.layers[0].main] == [16, 8]
    sparse = {
        "l.0.indexer": torch.zeros(8, 3),
        "l.0": (torch.zeros(8, 4), torch.zeros(8, 2)),
        "l.1": (torch.zeros(8, 4), torch.zeros(8, 2), torch.zeros(8, 3), torch.zeros(8, 1)),
    }
    layers = cache_layout(sparse, 8, 2).layers
    assert [layer.indexer is not None for layer in layers] == [True, True]
    assert [layer.scale is not None for layer in layers] == [False, True]
    with pytest.raises(LayoutError, match="no main KV cache was registered"):
        cache_layout({"l.0.indexer": torch.zeros(8, 3)}, 8, 1)


def test_slots_come_from_addresses() -> None:
    shared = torch.zeros(8, 4)
    slots = layer_slots(cache_layout({"l.0": shared, "l.1": torch.zeros(8, 4), "l.2": shared}, 8, 3))
    assert slots[0] == slots[2]
    assert slots[0] != slots[1]


def test_regions_are_whole_storages_once() -> None:
    whole = torch.zeros(2, 8, 4)
    regions = storage_regions({"l.0": whole[0], "l.1": (whole[1], None)})
    assert regions == [(whole.untyped_storage().data_ptr(), whole.untyped_storage().nbytes())]


def test_dtype_of_the_first_main_cache() -> None:
    caches = {"l.indexer": torch.zeros(1, dtype=torch.int8), "l": (None, torch.zeros(1, dtype=torch.bfloat16))}
    assert kv_dtype(caches) == "bfloat16"
    with pytest.raises(LayoutError):
        kv_dtype({"l.indexer": torch.zeros(1)})


# --- trust ---


def engine(engine_id: str, generation: int, role: Any = registry.ENGINE_ROLE_PREFILL) -> registry.Engine:
    return registry.Engine(engine_id=engine_id, generation=generation, role=role, host="h", base_port=1)


def snapshot(*engines: registry.Engine) -> dict[str, registry.Engine]:
    return {one.engine_id: one for one in engines}


def test_trust_follows_the_registry() -> None:
    trust = RegistryTrust(30.0)
    assert trust.update({}, 0.0).prefill_generations == set()
    now = snapshot(engine("p0", 1), engine("d0", 9, registry.ENGINE_ROLE_DECODE))
    registered = trust.update(now, 1.0)
    assert registered.prefill_generations == {1}
    assert registered.decode_addresses == {DecodeAddress(9, "h", 1)}
    assert trust.update(now, 2.0) is registered


def test_a_successor_ends_trust_at_once() -> None:
    """P3: the old process's memory may hold anything now."""
    trust = RegistryTrust(30.0)
    trust.update(snapshot(engine("p0", 1)), 0.0)
    assert trust.update(snapshot(engine("p0", 2)), 1.0).prefill_generations == {2}


def test_a_service_that_restarts_costs_no_trust_and_a_dead_engine_loses_it_in_time() -> None:
    """R1: for a while the registry is empty although every engine lives."""
    trust = RegistryTrust(30.0)
    trust.update(snapshot(engine("p0", 1), engine("p1", 2)), 0.0)
    empty: dict[str, registry.Engine] = {}
    assert trust.update(empty, 10.0).prefill_generations == {1, 2}
    back = snapshot(engine("p0", 1))
    assert trust.update(back, 20.0).prefill_generations == {1, 2}
    assert trust.update(back, 39.9).prefill_generations == {1, 2}
    assert trust.update(back, 40.0).prefill_generations == {1}
    assert trust.update(back, 1000.0).prefill_generations == {1}


def test_a_successor_after_the_gap_ends_trust_in_the_vanished_one() -> None:
    trust = RegistryTrust(30.0)
    trust.update(snapshot(engine("p0", 1)), 0.0)
    trust.update({}, 1.0)
    assert trust.update(snapshot(engine("p0", 2)), 2.0).prefill_generations == {2}


def test_an_engine_that_comes_and_goes_has_its_grace_anew() -> None:
    trust = RegistryTrust(30.0)
    trust.update(snapshot(engine("p0", 1)), 0.0)
    trust.update({}, 10.0)
    trust.update(snapshot(engine("p0", 1)), 20.0)
    assert trust.update({}, 45.0).prefill_generations == {1}
    assert trust.update({}, 74.0).prefill_generations == {1}
    assert trust.update({}, 75.0).prefill_generations == set()
