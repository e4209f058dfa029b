"""Configuration of the reference model, and its sizes checked."""

from typing import Any

from transformers import PreTrainedConfig

from rd2h.errors import ConfigError

MODEL_TYPE = "rd2h_reference_dsa"
ARCHITECTURE = "Rd2hReferenceDsaForCausalLM"


class ReferenceDsaConfig(PreTrainedConfig):
    """config.json of the reference model; the names are those that DeepSeek-V3.2 uses where it has them.

    ``index_reuse_layers``: layers without an indexer; they attend to what the nearest earlier layer selected.
    ``index_int8``: the indexer's cache holds int8 keys and one float16 scale a token.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 320,
        hidden_size: int = 256,
        intermediate_size: int = 384,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        q_lora_rank: int = 96,
        kv_lora_rank: int = 128,
        qk_nope_head_dim: int = 32,
        qk_rope_head_dim: int = 16,
        v_head_dim: int = 32,
        index_n_heads: int = 4,
        index_head_dim: int = 32,
        index_topk: int = 32,
        index_reuse_layers: list[int] | None = None,
        index_int8: bool = False,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        max_position_embeddings: int = 8192,
        **rest: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.index_n_heads = index_n_heads
        self.index_head_dim = index_head_dim
        self.index_topk = index_topk
        self.index_reuse_layers = list(index_reuse_layers or ())
        self.index_int8 = index_int8
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**rest)


def check_sizes(config: ReferenceDsaConfig, tp_size: int) -> None:
    """Raises ConfigError for sizes that the model cannot be built with."""
    for key in ("index_topk", "index_n_heads", "index_head_dim", "kv_lora_rank", "num_hidden_layers"):
        if getattr(config, key) < 1:
            raise ConfigError.bad_value(key, getattr(config, key), "1 or more")
    if config.qk_rope_head_dim % 2 or not 0 < config.qk_rope_head_dim <= config.index_head_dim:
        allowed = f"an even number of 2..index_head_dim ({config.index_head_dim})"
        raise ConfigError.bad_value("qk_rope_head_dim", config.qk_rope_head_dim, allowed)
    if config.num_attention_heads % tp_size:
        allowed = f"a multiple of the tensor-parallel size {tp_size}"
        raise ConfigError.bad_value("num_attention_heads", config.num_attention_heads, allowed)
    if config.intermediate_size % tp_size:
        allowed = f"a multiple of the tensor-parallel size {tp_size}"
        raise ConfigError.bad_value("intermediate_size", config.intermediate_size, allowed)
    reuse = config.index_reuse_layers
    if any(not 0 < layer < config.num_hidden_layers for layer in reuse) or len(set(reuse)) != len(reuse):
        allowed = f"different layers of 1..{config.num_hidden_layers - 1}"
        raise ConfigError.bad_value("index_reuse_layers", reuse, allowed)


def selection_source(config: ReferenceDsaConfig, layer: int) -> int:
    """The layer whose indexer selects for ``layer``: itself, or the nearest earlier one that has an indexer."""
    while layer in config.index_reuse_layers:
        layer -= 1
    return layer
