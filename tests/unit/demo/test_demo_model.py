"""The tiny model: same bytes every time, real scale, loadable tokenizer."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from rd2h.demo.model import BOS_ID, PRINTABLE, ModelShape, model_dir

SMALL = ModelShape(layers=2, hidden_size=64, mlp_size=96, kv_lora_rank=32, rope_head_dim=16)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_same_bytes_every_time_and_others_for_another_seed(tmp_path: Path) -> None:
    first = model_dir(SMALL, tmp_path / "a")
    second = model_dir(SMALL, tmp_path / "b")
    other = model_dir(replace(SMALL, seed=1), tmp_path / "a")
    assert digest(first) == digest(second) != digest(other)
    assert first.name == second.name != other.name


def test_second_call_makes_nothing(tmp_path: Path) -> None:
    folder = model_dir(SMALL, tmp_path)
    marker = (folder / "config.json").stat().st_mtime_ns
    assert model_dir(SMALL, tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == marker
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name]


def test_weights_have_real_scale(tmp_path: Path) -> None:
    tensors = load_file(model_dir(SMALL, tmp_path) / "model.safetensors")
    assert 0.9 < np.std(tensors["model.embed_tokens.weight"]) < 1.1
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        if name.endswith(("proj.weight", "with_mqa.weight")):
            gain = float(np.std(tensor)) * tensor.shape[1] ** 0.5
            assert 1.8 < gain < 3.2, name


def test_only_printable_tokens_are_generated(tmp_path: Path) -> None:
    head = load_file(model_dir(SMALL, tmp_path) / "model.safetensors")["lm_head.weight"]
    live = {int(row) for row in np.flatnonzero(np.abs(head).sum(axis=1))}
    assert live == set(PRINTABLE)


def test_no_layer_has_experts_and_sizes_are_consistent(tmp_path: Path) -> None:
    config = json.loads((model_dir(SMALL, tmp_path) / "config.json").read_text(encoding="utf-8"))
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2
    assert config["bos_token_id"] == BOS_ID < config["vocab_size"]


def test_default_shape_is_what_the_cpu_kernel_takes() -> None:
    shape = ModelShape()
    assert (shape.kv_lora_rank, shape.rope_head_dim) == (512, 64)
    assert shape.kv_bytes_per_token_layer == 576 * 4


def test_token_is_byte(tmp_path: Path) -> None:
    tokenizer = json.loads((model_dir(SMALL, tmp_path) / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    assert len(vocabulary) == 256
    assert vocabulary["A"] == ord("A")
    # Byte-level tokenizers write a space as U+0120.
    assert vocabulary["\u0120"] == 0x20
