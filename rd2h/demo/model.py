"""A tiny random MLA model that real vLLM engines can load: config, weights, byte-level tokenizer, chat template.

The weights are random but of a real model's scale (see `_GAIN`), so that every next token depends on the whole
context: with vLLM's own dummy weights the output depends on the last token only, and a comparison of tokens could not
fail. The files are made once and kept in a cache folder, keyed by a digest of everything that decides their bytes.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rd2h.errors import ConfigError

# Number of the recipe below; a new recipe makes a new folder in the cache.
RECIPE = 3
BYTES = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BOS_ID = BYTES + SPECIAL_TOKENS.index("<bos>")
EOS_ID = BYTES + SPECIAL_TOKENS.index("<eos>")
PRINTABLE = range(0x20, 0x7F)
# Output scale of a projection relative to its input, for fan-in-normalised weights.
_GAIN = {"q_proj": 3.0, "kv_a_proj_with_mqa": 2.5, "kv_b_proj": 2.5, "o_proj": 2.5}
_MLP_GAIN = 2.0
_HEAD_GAIN = 4.0

# Tools and their calls are part of the prompt, as with real models.
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or () %}{{ call['function'] | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. The MLA sizes are those the CPU kernel supports (512 + 64 values a token)."""

    layers: int = 5
    hidden_size: int = 256
    heads: int = 4
    nope_head_dim: int = 32
    rope_head_dim: int = 64
    value_head_dim: int = 32
    kv_lora_rank: int = 512
    mlp_size: int = 384
    max_tokens: int = 8192
    seed: int = 20260

    @property
    def vocabulary(self) -> int:
        """Number of tokens, padded to a multiple of 64."""
        return -(-(BYTES + len(SPECIAL_TOKENS)) // 64) * 64

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of KV cache for one token in one layer (float32)."""
        return (self.kv_lora_rank + self.rope_head_dim) * 4


def default_cache_dir() -> Path:
    """`$RD2H_CACHE`, else `rd2h` in the user's cache folder."""
    chosen = os.environ.get("RD2H_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rd2h"


def config_of(shape: ModelShape) -> dict[str, object]:
    """The model's config.json: DeepSeek-V2 architecture with dense layers only."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "moe_intermediate_size": 64,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        # Every layer is below this index, so no layer has experts.
        "first_k_dense_replace": shape.layers,
        "moe_layer_freq": 1,
        "kv_lora_rank": shape.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": shape.nope_head_dim,
        "qk_rope_head_dim": shape.rope_head_dim,
        "v_head_dim": shape.value_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _weights(shape: ModelShape) -> dict[str, NDArray[np.float32]]:
    """All tensors, drawn in a fixed order from one seeded generator. Projections have shape (out, in)."""
    random = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(gain / columns**0.5)
        return values

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    hidden, heads = shape.hidden_size, shape.heads
    tensors = {"model.embed_tokens.weight": random.standard_normal((shape.vocabulary, hidden), dtype=np.float32)}
    projections = {
        "q_proj": (heads * (shape.nope_head_dim + shape.rope_head_dim), hidden),
        "kv_a_proj_with_mqa": (shape.kv_lora_rank + shape.rope_head_dim, hidden),
        "kv_b_proj": (heads * (shape.nope_head_dim + shape.value_head_dim), shape.kv_lora_rank),
        "o_proj": (hidden, heads * shape.value_head_dim),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in projections.items():
            tensors[f"{prefix}.self_attn.{name}.weight"] = matrix(rows, columns, _GAIN[name])
        tensors[f"{prefix}.self_attn.kv_a_layernorm.weight"] = ones(shape.kv_lora_rank)
        for name, (rows, columns) in {
            "gate_proj": (shape.mlp_size, hidden),
            "up_proj": (shape.mlp_size, hidden),
            "down_proj": (hidden, shape.mlp_size),
        }.items():
            tensors[f"{prefix}.mlp.{name}.weight"] = matrix(rows, columns, _MLP_GAIN)
        tensors[f"{prefix}.input_layernorm.weight"] = ones(hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones(hidden)
    tensors["model.norm.weight"] = ones(hidden)
    head = matrix(shape.vocabulary, hidden, _HEAD_GAIN)
    # Tokens that do not print keep the logit 0, below the best of 95 random ones: the demo's answers stay readable.
    hidden_tokens = np.ones(shape.vocabulary, dtype=bool)
    hidden_tokens[PRINTABLE.start : PRINTABLE.stop] = False
    head[hidden_tokens] = 0.0
    tensors["lm_head.weight"] = head
    return tensors


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins that byte-level tokenizers use for bytes, in byte order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in plain}
    spare = 0
    for byte in range(BYTES):
        if byte not in symbols:
            symbols[byte] = chr(BYTES + spare)
            spare += 1
    return [symbols[byte] for byte in range(BYTES)]


def _tokenizer() -> dict[str, object]:
    """tokenizer.json: token id = byte value, no merges, three special tokens behind them."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BYTES + i, "content": text, **special} for i, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: token for token, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def _write(folder: Path, shape: ModelShape) -> None:
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise ConfigError(f"the module {error.name} is missing; pip install 'rd2h[cpu]' brings it") from None

    def dump(name: str, value: object) -> None:
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    dump("config.json", config_of(shape))
    dump("generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    dump("tokenizer.json", _tokenizer())
    dump(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_tokens,
            "pad_token": SPECIAL_TOKENS[0],
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    save_file(_weights(shape), folder / "model.safetensors", metadata={"format": "pt"})


def model_dir(shape: ModelShape | None = None, cache_dir: Path | None = None) -> Path:
    """Returns the folder of the model, made on the first call (about 10 MB). Safe against concurrent makers."""
    shape = shape or ModelShape()
    facts = json.dumps({"recipe": RECIPE, **dataclasses.asdict(shape)}, sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    folder = (cache_dir or default_cache_dir()) / "models" / f"tiny-mla-{digest}"
    return made_once(folder, lambda scratch: _write(scratch, shape))


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `write` on the first call. Safe against concurrent makers of the same files."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        write(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process was faster; its files are the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
