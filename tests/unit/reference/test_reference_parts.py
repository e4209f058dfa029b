"""Small parts: rotary embedding, paged rows, batches, configuration, weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rd2h.errors import ConfigError
from rd2h.reference.batch import SparseBatch
from rd2h.reference.config import ReferenceDsaConfig, check_sizes, selection_source
from rd2h.reference.paged import leading_rows, rows_at, slots_of, write_rows
from rd2h.reference.rotary import Rotary
from rd2h.reference.weights import SparseShape, sparse_model_dir, weights_of


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_keeps_lengths_and_depends_on_the_distance_only(interleaved: bool) -> None:
    rotary = Rotary(8, 10000.0, interleaved)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def product(query_at: int, key_at: int) -> float:
        rotated = rotary(torch.stack((query, key)), torch.tensor([query_at, key_at]))
        assert float(rotated[0].norm()) == pytest.approx(float(query.norm()))
        return float(rotated[0] @ rotated[1])

    assert product(5, 2) == pytest.approx(product(1005, 1002))
    assert product(5, 2) != pytest.approx(product(5, 3), abs=1e-3)
    heads = rotary(query.expand(2, 3, 8), torch.tensor([4, 9]))
    torch.testing.assert_close(heads[1, 2], rotary(query[None], torch.tensor([9]))[0])


def test_rows_are_found_where_they_were_written_and_padding_is_not_written() -> None:
    cache = torch.zeros(4, 2, 3)
    write_rows(cache, torch.arange(9.0).view(3, 3), torch.tensor([7, -1, 2]))
    assert cache[3, 1].tolist() == [0.0, 1.0, 2.0]
    assert cache[1, 0].tolist() == [6.0, 7.0, 8.0]
    assert int((cache != 0).sum()) == 5
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    slots = slots_of(torch.tensor([[1, 2]]), table, 2)
    assert slots.tolist() == [[7, 2]]
    assert rows_at(cache, slots)[0].tolist() == [[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]]
    assert leading_rows(cache, table[0], 3).tolist() == [[0.0] * 3, [0.0, 1.0, 2.0], [6.0, 7.0, 8.0]]


def test_batch_leaves_padded_requests_and_tokens_out() -> None:
    batch = SparseBatch.of(
        torch.tensor([0, 3, 4, 4], dtype=torch.int32),
        torch.tensor([10, 1, 0], dtype=torch.int32),
        torch.zeros(3, 2, dtype=torch.int32),
        torch.tensor([5, 6, 7, 8, -1, -1]),
        torch.tensor([11, 12, 0], dtype=torch.uint64),
    )
    assert batch.num_tokens == 4
    assert batch.token_requests.tolist() == [0, 0, 0, 1]
    assert batch.positions.tolist() == [7, 8, 9, 0]
    assert batch.slots.tolist() == [5, 6, 7, 8]
    assert batch.request_keys is not None
    assert batch.request_keys.tolist() == [11, 12]


def test_layers_that_reuse_follow_the_nearest_indexer() -> None:
    config = ReferenceDsaConfig(num_hidden_layers=5, index_reuse_layers=[1, 2, 4])
    assert [selection_source(config, layer) for layer in range(5)] == [0, 0, 0, 3, 3]


@pytest.mark.parametrize(
    ("changes", "tp_size", "key"),
    [
        ({"index_topk": 0}, 1, "index_topk"),
        ({"qk_rope_head_dim": 15}, 1, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 64}, 1, "qk_rope_head_dim"),
        ({"num_attention_heads": 3}, 2, "num_attention_heads"),
        ({"intermediate_size": 385}, 2, "intermediate_size"),
        ({"index_reuse_layers": [0]}, 1, "index_reuse_layers"),
        ({"index_reuse_layers": [4]}, 1, "index_reuse_layers"),
        ({"index_reuse_layers": [1, 1]}, 1, "index_reuse_layers"),
    ],
)
def test_impossible_sizes_are_named(changes: dict[str, object], tp_size: int, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sizes(ReferenceDsaConfig(**changes), tp_size)
    assert caught.value.key == key


def test_weights_are_repeatable_and_of_real_scale(tmp_path: Path) -> None:
    shape = SparseShape(layers=2, reuse_layers=(1,))
    first, again = weights_of(shape, 320), weights_of(shape, 320)
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert float(first["model.embed_tokens.weight"].std()) == pytest.approx(1.0, abs=0.02)
    projection = first["model.layers.0.self_attn.q_b_proj.weight"]
    assert float(projection.std()) * projection.shape[1] ** 0.5 == pytest.approx(2.5, rel=0.05)
    assert not any("layers.1.self_attn.indexer" in name for name in first)


def test_model_folder_is_made_once_and_keyed_by_its_shape(tmp_path: Path) -> None:
    shape = SparseShape(layers=1, reuse_layers=())
    folder = sparse_model_dir(shape, tmp_path)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert sparse_model_dir(shape, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert sparse_model_dir(SparseShape(layers=1, reuse_layers=(), index_topk=16), tmp_path) != folder
    config = json.loads((folder / "config.json").read_text())
    assert ReferenceDsaConfig(**{k: v for k, v in config.items() if k != "model_type"}).index_topk == 32
    assert not list(folder.parent.glob(".making-*"))
