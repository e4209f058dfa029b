"""Random weights for the reference model, of a real model's scale, with the demo's byte-level tokenizer."""

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rd2h.demo.model import BOS_ID, EOS_ID, PRINTABLE, ModelShape, default_cache_dir, made_once, model_dir
from rd2h.errors import ConfigError
from rd2h.reference.config import ARCHITECTURE, MODEL_TYPE

# Number of the recipe below; a new recipe makes a new folder in the cache.
RECIPE = 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Output scale of a projection relative to its input, for fan-in-normalised weights.
_GAIN = 2.5
_HEAD_GAIN = 4.0


@dataclass(frozen=True)
class SparseShape:
    """Sizes of the model. Main to indexer is 144 to 32 features a token, the ratio of the real model's 576 to 128."""

    layers: int = 4
    # Layers without an indexer of their own.
    reuse_layers: tuple[int, ...] = (1, 3)
    hidden_size: int = 256
    mlp_size: int = 384
    heads: int = 4
    query_rank: int = 96
    kv_lora_rank: int = 128
    nope_head_dim: int = 32
    rope_head_dim: int = 16
    value_head_dim: int = 32
    index_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 32
    index_int8: bool = False
    max_tokens: int = 8192
    seed: int = 4242

    @property
    def indexer_layers(self) -> int:
        """Layers with an indexer."""
        return self.layers - len(self.reuse_layers)

    @property
    def main_bytes_per_token(self) -> int:
        """Main KV bytes of one token in all layers (float32)."""
        return self.layers * (self.kv_lora_rank + self.rope_head_dim) * 4

    @property
    def indexer_bytes_per_token(self) -> int:
        """Indexer bytes of one token in all layers: float32 keys, or int8 keys with a float16 scale."""
        return self.indexer_layers * (self.index_head_dim + 2 if self.index_int8 else self.index_head_dim * 4)


def config_of(shape: SparseShape, vocabulary: int) -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope_head_dim,
        "qk_rope_head_dim": shape.rope_head_dim,
        "v_head_dim": shape.value_head_dim,
        "index_n_heads": shape.index_heads,
        "index_head_dim": shape.index_head_dim,
        "index_topk": shape.index_topk,
        "index_reuse_layers": list(shape.reuse_layers),
        "index_int8": shape.index_int8,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _projections(shape: SparseShape, layer: int) -> dict[str, tuple[int, int]]:
    """Names and shapes (out, in) of a layer's projections."""
    hidden, heads = shape.hidden_size, shape.heads
    projections = {
        "self_attn.q_a_proj": (shape.query_rank, hidden),
        "self_attn.q_b_proj": (heads * (shape.nope_head_dim + shape.rope_head_dim), shape.query_rank),
        "self_attn.kv_a_proj": (shape.kv_lora_rank + shape.rope_head_dim, hidden),
        "self_attn.kv_b_proj": (heads * (shape.nope_head_dim + shape.value_head_dim), shape.kv_lora_rank),
        "self_attn.o_proj": (hidden, heads * shape.value_head_dim),
        "mlp.gate_proj": (shape.mlp_size, hidden),
        "mlp.up_proj": (shape.mlp_size, hidden),
        "mlp.down_proj": (hidden, shape.mlp_size),
    }
    if layer not in shape.reuse_layers:
        projections |= {
            "self_attn.indexer.wq_b": (shape.index_heads * shape.index_head_dim, shape.query_rank),
            "self_attn.indexer.wk": (shape.index_head_dim, hidden),
            "self_attn.indexer.weights_proj": (shape.index_heads, hidden),
        }
    return projections


def _norms(shape: SparseShape, layer: int) -> dict[str, int]:
    """Names and sizes of a layer's norms."""
    norms = {
        "input_norm": shape.hidden_size,
        "self_attn.q_a_norm": shape.query_rank,
        "self_attn.kv_a_norm": shape.kv_lora_rank,
        "post_norm": shape.hidden_size,
    }
    if layer not in shape.reuse_layers:
        norms["self_attn.indexer.k_norm"] = shape.index_head_dim
    return norms


def weights_of(shape: SparseShape, vocabulary: int) -> dict[str, NDArray[np.float32]]:
    """All tensors, drawn in a fixed order from one seeded generator."""
    random = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(gain / columns**0.5)
        return values

    tensors = {"model.embed_tokens.weight": random.standard_normal((vocabulary, shape.hidden_size), dtype=np.float32)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in _projections(shape, layer).items():
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns, _GAIN)
        for name, size in _norms(shape, layer).items():
            tensors[f"{prefix}.{name}.weight"] = np.ones(size, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(shape.hidden_size, dtype=np.float32)
    head = matrix(vocabulary, shape.hidden_size, _HEAD_GAIN)
    # Tokens that do not print keep the logit 0, below the best of 95 random ones: answers stay readable.
    hidden_tokens = np.ones(vocabulary, dtype=bool)
    hidden_tokens[PRINTABLE.start : PRINTABLE.stop] = False
    head[hidden_tokens] = 0.0
    tensors["lm_head.weight"] = head
    return tensors


def sparse_model_dir(shape: SparseShape | None = None, cache_dir: Path | None = None) -> Path:
    """Returns the folder of the model, made on the first call. Safe against concurrent makers."""
    shape = shape or SparseShape()
    cache_dir = cache_dir or default_cache_dir()
    facts = json.dumps({"recipe": RECIPE, **dataclasses.asdict(shape)}, sort_keys=True)
    folder = cache_dir / "models" / f"tiny-dsa-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    return made_once(folder, lambda scratch: _write(scratch, shape, model_dir(ModelShape(), cache_dir)))


def _write(folder: Path, shape: SparseShape, tokenizer: Path) -> None:
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise ConfigError(f"the module {error.name} is missing; pip install 'rd2h[cpu]' brings it") from None
    vocabulary = ModelShape().vocabulary
    config = json.dumps(config_of(shape, vocabulary), indent=1) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    save_file(weights_of(shape, vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
