"""Layers from registered caches, the layer map on the wire, validation, fingerprint, physical slots."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from core_frames import mutate, nested
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.errors import LayoutError
from rd2h.layout import (
    MAX_LAYERS,
    CacheLayout,
    Contract,
    LayerLayout,
    TensorLayout,
    assemble,
    check_source,
    contract_layers,
    decode_layer_map,
    encode_layer_map,
    layer_number,
    storage_slots,
)

LAYER = "model.layers.{}.self_attn.attn".format
INDEXER = "model.layers.{}.self_attn.indexer.k_cache".format


def tensor(number: int, block_bytes: int = 64) -> TensorLayout:
    return TensorLayout(number << 20, block_bytes, 8)


# --- assembling ---


def sparse_caches(indexer_in_tuple: bool) -> dict[str, list[TensorLayout]]:
    """Three layers: sparse with scale, dense, and an MTP layer that is sparse without scale."""
    indexers = {0: [tensor(2, 16), tensor(3, 4)], 2: [tensor(22, 16)]}
    names = {0: LAYER(0), 1: LAYER(1), 2: "model.mtp.layers.0.self_attn.attn"}
    indexer_names = {0: INDEXER(0), 2: "model.mtp.layers.0.self_attn.indexer.k_cache"}
    caches: dict[str, list[TensorLayout]] = {}
    for number, name in names.items():
        caches[name] = [tensor(10 * number), tensor(10 * number + 1, 8)]
        if number in indexers:
            if indexer_in_tuple:
                caches[name] += indexers[number]
            else:
                caches[indexer_names[number]] = indexers[number]
    return caches


EXPECTED = CacheLayout(
    (
        LayerLayout(LAYER(0), (tensor(0), tensor(1, 8)), tensor(2, 16), tensor(3, 4)),
        LayerLayout(LAYER(1), (tensor(10), tensor(11, 8))),
        LayerLayout("model.mtp.layers.0.self_attn.attn", (tensor(20), tensor(21, 8)), tensor(22, 16)),
    )
)


@pytest.mark.parametrize("indexer_in_tuple", [True, False])
def test_assembly_does_not_depend_on_the_order(indexer_in_tuple: bool) -> None:
    caches = sparse_caches(indexer_in_tuple)
    for order in itertools.permutations(caches.items()):
        assert assemble(dict(order), 2, base_layers=2) == EXPECTED


def test_indexer_in_its_own_cache_and_scale_in_the_tuple_do_not_mix_up() -> None:
    caches = {LAYER(0): [tensor(0), tensor(2)], INDEXER(0): [tensor(1)]}
    layer = assemble(caches, 1, 1).layers[0]
    assert layer.indexer_tensors == (tensor(2), tensor(1)), "what is in the tuple comes first"


def test_layers_sort_by_number_not_by_text() -> None:
    caches = {LAYER(number): [tensor(number)] for number in (10, 2, 9, 0, 11)}
    assert [layer.name for layer in assemble(caches, 1, 61).layers] == [LAYER(n) for n in (0, 2, 9, 10, 11)]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (LAYER(7), 7),
        ("layers.7", 7),
        ("model.layers.61.mtp_block.self_attn.attn", 61),
        ("mtp.0.self_attn.attn", 61),
        ("model.mtp.layers.1.self_attn.attn", 62),
        ("model.mtp.1.layers.0.attn", 62),
        ("encoder3.attn", 3),
        ("attn", 0),
        ("model.sublayers.5.attn", 5),
    ],
)
def test_layer_numbers(name: str, number: int) -> None:
    assert layer_number(name, base_layers=61) == number


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({}, ["no cache-bearing layer"]),
        ({LAYER(0): [tensor(0)]}, [LAYER(0), "1 tensors", "2 main tensors"]),
        ({LAYER(0): [tensor(n) for n in range(5)]}, [LAYER(0), "3 tensors besides main"]),
        ({LAYER(0): [tensor(0), tensor(1)], "layers.0.other": [tensor(2), tensor(3)]}, ["layer 0", "two main caches"]),
        (
            {LAYER(0): [tensor(0), tensor(1)], INDEXER(0): [tensor(2)], "layers.0.indexer": [tensor(3)]},
            ["layer 0", "two indexer caches"],
        ),
        ({LAYER(0): [tensor(0), tensor(1)], INDEXER(3): [tensor(2)]}, ["[3]", "no main cache"]),
        (
            {LAYER(0): [tensor(0), tensor(1), tensor(2), tensor(3)], INDEXER(0): [tensor(4)]},
            [LAYER(0), "3 tensors besides main"],
        ),
    ],
)
def test_pieces_that_do_not_fit(caches: dict[str, Sequence[TensorLayout]], words: list[str]) -> None:
    with pytest.raises(LayoutError) as raised:
        assemble(caches, 2, 1)
    assert all(word in str(raised.value) for word in words)


def test_a_cache_layout_needs_distinct_layers() -> None:
    layer = LayerLayout("a", (tensor(0),))
    with pytest.raises(LayoutError, match="occurs twice"):
        CacheLayout((layer, layer))
    assert EXPECTED.index_of() == {layer.name: index for index, layer in enumerate(EXPECTED.layers)}
    assert EXPECTED.has_indexer
    assert not CacheLayout((layer,)).has_indexer
    assert EXPECTED.layers[0].block_bytes == 64 + 8 + 16 + 4


# --- validation against a peer ---

SOURCE = LayerLayout("l", (tensor(0, 100), tensor(1, 20)), tensor(2, 30), tensor(3, 7))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"main": (tensor(0, 100),)}, ["main tensor count 1 on Prefill", "2 on Decode"]),
        ({"main": (tensor(0, 101), tensor(1, 20))}, ["main tensor 0", "101 on Prefill", "100 on Decode"]),
        ({"main": (tensor(0, 100), tensor(1, 21))}, ["main tensor 1", "21 on Prefill", "20 on Decode"]),
        ({"main": (tensor(0, 20), tensor(1, 100))}, ["main tensor 0", "20 on Prefill", "100 on Decode"]),
        ({"indexer": None, "scale": None}, ["indexer", "absent on Prefill", "present on Decode"]),
        ({"indexer": tensor(2, 31)}, ["indexer", "31 on Prefill", "30 on Decode"]),
        ({"scale": None}, ["scale", "absent on Prefill", "present on Decode"]),
        ({"scale": tensor(3, 8)}, ["scale", "8 on Prefill", "7 on Decode"]),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LayoutError) as raised:
        check_source(dataclasses.replace(SOURCE, **change), SOURCE)
    assert all(word in str(raised.value) for word in ["'l'", *words])
    # and the other way round
    with pytest.raises(LayoutError) as raised:
        check_source(SOURCE, dataclasses.replace(SOURCE, **change))
    assert "'l'" in str(raised.value)
    assert words[0].split(" count")[0] in str(raised.value)


def test_addresses_and_numbers_of_blocks_are_each_sides_own() -> None:
    elsewhere = LayerLayout(
        "l", tuple(TensorLayout(t.base_addr + 4096, t.block_bytes, 0) for t in SOURCE.main), tensor(9, 30), tensor(8, 7)
    )
    check_source(elsewhere, SOURCE)
    check_source(SOURCE, SOURCE)


# --- fingerprint ---

CONTRACT = Contract(1, "host", "", "model", "bfloat16", 128, (("a", (100, 20), 30, 7), ("b", (100, 20), 0, 0)))


@pytest.mark.parametrize(
    "change",
    [
        {"wire_version": 2},
        {"transfer_backend": "memfabric"},
        {"transfer_protocol": "sdma"},
        {"model": "model2"},
        {"kv_dtype": "float8"},
        {"block_size_tokens": 64},
        {"layers": CONTRACT.layers[::-1]},
        {"layers": CONTRACT.layers[:1]},
        {"layers": (("c", *CONTRACT.layers[0][1:]), CONTRACT.layers[1])},
        {"layers": (("a", (20, 100), 30, 7), CONTRACT.layers[1])},
        {"layers": (("a", (100, 20, 30), 0, 7), CONTRACT.layers[1])},
        {"layers": (("a", (100, 20), 31, 7), CONTRACT.layers[1])},
        {"layers": (("a", (100, 20), 30, 0), CONTRACT.layers[1])},
        {"transfer_backend": "hostx", "transfer_protocol": ""},
    ],
)
def test_every_field_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert dataclasses.replace(CONTRACT, **change).fingerprint() != CONTRACT.fingerprint()


def test_every_field_of_the_contract_is_tested_above() -> None:
    tested = {
        "wire_version",
        "transfer_backend",
        "transfer_protocol",
        "model",
        "kv_dtype",
        "block_size_tokens",
        "layers",
    }
    assert {field.name for field in dataclasses.fields(Contract)} == tested


def test_neighbouring_texts_do_not_run_together() -> None:
    left = dataclasses.replace(CONTRACT, transfer_backend="ab", transfer_protocol="c")
    right = dataclasses.replace(CONTRACT, transfer_backend="a", transfer_protocol="bc")
    assert left.fingerprint() != right.fingerprint()


def test_fingerprint_is_stable() -> None:
    assert CONTRACT.fingerprint() == dataclasses.replace(CONTRACT).fingerprint()
    assert len(CONTRACT.fingerprint()) == 32


def test_contract_layers() -> None:
    assert contract_layers(EXPECTED) == (
        (LAYER(0), (64, 8), 16, 4),
        (LAYER(1), (64, 8), 0, 0),
        ("model.mtp.layers.0.self_attn.attn", (64, 8), 16, 0),
    )


# --- layer map ---

tensors = st.builds(TensorLayout, st.integers(0, 2**64 - 1), st.integers(1, 1 << 40), st.just(0))
layer_layouts = st.builds(
    lambda name, main, extra: LayerLayout(name, tuple(main), *extra),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(tensors, min_size=1, max_size=8),
    st.lists(tensors, max_size=2),
)


@settings(deadline=None)
@given(st.lists(layer_layouts, min_size=1, max_size=6, unique_by=lambda layer: layer.name))
def test_layer_map_round_trip(layers: list[LayerLayout]) -> None:
    decoded = decode_layer_map(encode_layer_map(CacheLayout(tuple(layers))))
    assert list(decoded.values()) == layers
    assert list(decoded) == [layer.name for layer in layers]


def entry(**changes: Any) -> dict[str, Any]:
    good = {
        "base_addrs": [1 << 40, 2 << 40, 3 << 40],
        "block_len": [64, 8, 16],
        "block_size_scale": [1, 2, 1],
        "tensor_group_idx": [0, 0, 1],
        "main_tensor_count": 2,
        "has_indexer": True,
    }
    changed = {**good, **changes}
    return {key: value for key, value in changed.items() if value != "left out"}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({}, "1..4096"),
        ([], "1..4096"),
        (None, "1..4096"),
        ({f"l{n}": None for n in range(MAX_LAYERS + 1)}, "1..4096"),
        ({"l": None}, "names to maps"),
        ({b"l": entry()}, "names to maps"),
        ({"l": []}, "names to maps"),
        *[
            ({"l": entry(**{key: value})}, key)
            for key in ("base_addrs", "block_len", "block_size_scale")
            for value in ("left out", None, 1, [], [1, 2], [True, 1, 1], [1.0, 1, 1], ["1", 1, 1], [-1, 1, 1], [1] * 11)
        ],
        ({"l": entry(base_addrs=[1, 1, [1]])}, "base_addrs"),
        ({"l": entry(block_len=[(1 << 40) + 1, 1, 1])}, "block_len"),
        ({"l": entry(block_size_scale=[(1 << 20) + 1, 1, 1])}, "block_size_scale"),
        ({"l": entry(block_len=[0, 1, 1])}, "0 bytes"),
        ({"l": entry(block_size_scale=[1, 0, 1])}, "0 bytes"),
        *[
            ({"l": entry(main_tensor_count=value)}, "main_tensor_count")
            for value in (None, 0, -1, 9, True, 1.0, "2", [2])
        ],
        *[({"l": entry(has_indexer=value)}, "has_indexer") for value in ("left out", None, 0, 1, "yes", [True])],
        ({"l": entry(has_indexer=False)}, "3 tensors do not fit"),
        ({"l": entry(main_tensor_count=3)}, "3 tensors do not fit"),
        ({"l": entry(main_tensor_count=4)}, "3 tensors do not fit"),
        (
            {"l": entry(main_tensor_count=1, base_addrs=[1] * 4, block_len=[1] * 4, block_size_scale=[1] * 4)},
            "4 tensors",
        ),
    ],
)
def test_hostile_layer_maps(layers: object, words: str) -> None:
    assert list(decode_layer_map(msgpack.packb({"l": entry()}))) == ["l"]
    with pytest.raises(LayoutError) as raised:
        decode_layer_map(msgpack.packb(layers))
    assert words in str(raised.value)


@pytest.mark.parametrize("depth", [10, 600, 1000, 5000])
def test_deeply_nested_layer_maps(depth: int) -> None:
    for key in ("base_addrs", "main_tensor_count", "has_indexer"):
        packed = b"".join(
            msgpack.packb(name) + (nested(depth) if name == key else msgpack.packb(value))
            for name, value in entry().items()
        )
        with pytest.raises(LayoutError):
            decode_layer_map(b"\x81\xa1l" + bytes((0x80 | len(entry()),)) + packed)


def test_mutated_layer_maps() -> None:
    seeds = [
        encode_layer_map(EXPECTED),
        msgpack.packb({"l": entry(), "m": entry(has_indexer=False, main_tensor_count=3)}),
    ]
    source = random.Random(3)
    accepted = 0
    for _ in range(6000):
        try:
            layers = decode_layer_map(mutate(source, seeds))
        except LayoutError:
            continue
        accepted += 1
        for name, layer in layers.items():
            assert layer.name == name
            assert 1 <= len(layer.main) <= 8
            assert all(type(t.base_addr) is int and 0 <= t.base_addr < 1 << 64 for t in layer.tensors)
            assert all(type(t.block_bytes) is int and 1 <= t.block_bytes <= 1 << 60 for t in layer.tensors)
            assert layer.scale is None or layer.indexer is not None
    assert 30 < accepted < 5900


# --- physical slots ---


def slots_reference(components: Sequence[Sequence[TensorLayout]]) -> list[int | None]:
    """Transitive closure of "some bytes overlap", written down as plainly as possible."""

    def overlap(left: Sequence[TensorLayout], right: Sequence[TensorLayout]) -> bool:
        return any(
            max(a.base_addr, b.base_addr) < min(a.end_addr, b.end_addr) for a, b in itertools.product(left, right)
        )

    labels = list(range(len(components)))
    changed = True
    while changed:
        changed = False
        for i, j in itertools.combinations(range(len(components)), 2):
            if labels[i] != labels[j] and overlap(components[i], components[j]):
                labels[i] = labels[j] = min(labels[i], labels[j])
                changed = True
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(label, len(numbers)) if tensors else None
        for label, tensors in zip(labels, components, strict=True)
    ]


overlapping = st.builds(
    TensorLayout, st.integers(0, 60) | st.integers(2**64 - 60, 2**64 - 1), st.integers(1, 4), st.integers(1, 6)
)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.lists(overlapping, max_size=3), max_size=9))
def test_slots_agree_with_the_reference(components: list[list[TensorLayout]]) -> None:
    assert storage_slots(components) == slots_reference(components)


def test_a_ring_of_buffers() -> None:
    """61 layers over 3 physical buffers, whatever the names say."""
    ring = [[tensor(index % 3), tensor(100 + index % 3, 8)] for index in range(61)]
    assert storage_slots(ring) == [index % 3 for index in range(61)]
    assert storage_slots([[], *ring[:4], []]) == [None, 0, 1, 2, 0, None]
    assert storage_slots([]) == []


def test_touching_buffers_are_not_shared() -> None:
    assert storage_slots([[TensorLayout(0, 8, 4)], [TensorLayout(32, 8, 4)], [TensorLayout(63, 1, 1)]]) == [0, 1, 1]
