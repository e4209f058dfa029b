"""The reference model as vLLM loads it: embeddings, decoder layers with sparse latent attention, logits."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import maybe_prefix

from rd2h.errors import ConfigError
from rd2h.reference.attention import SparseLatentAttention
from rd2h.reference.config import ReferenceDsaConfig, check_sizes
from rd2h.reference.layers import Mlp, RmsNorm, TokenEmbedding


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ReferenceDsaConfig, layer: int, layers_prefix: str, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.input_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SparseLatentAttention(config, layer, layers_prefix, vllm_config)
        self.post_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, selections: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        hidden = hidden + self.self_attn(self.input_norm(hidden), positions, selections)
        return hidden + self.mlp(self.post_norm(hidden))


class DsaModel(nn.Module):
    """Token ids to the last hidden states."""

    def __init__(self, config: ReferenceDsaConfig, prefix: str, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, f"{prefix}.layers", vllm_config) for layer in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states float64[tokens, hidden] of int[tokens] ids."""
        hidden = self.embed_tokens(input_ids)
        selections: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            hidden = layer(hidden, positions, selections)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class Rd2hReferenceDsaForCausalLM(nn.Module):
    """vLLM's interface of a model that generates text."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        if not isinstance(config, ReferenceDsaConfig):
            raise ConfigError.bad_value("model_type", config.model_type, [ReferenceDsaConfig.model_type])
        check_sizes(config, get_tensor_model_parallel_world_size())
        self._dtype = vllm_config.model_config.dtype
        self.model = DsaModel(config, maybe_prefix(prefix, "model"), vllm_config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of int[tokens] ids."""
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: object = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden]. Raises ConfigError for pipeline stages and for embeddings as input."""
        if intermediate_tensors is not None or inputs_embeds is not None:
            raise ConfigError("the reference model knows neither pipeline stages nor embeddings as input")
        hidden: torch.Tensor = self.model(input_ids, positions).to(self._dtype)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits [tokens, vocabulary]; None where another rank has them."""
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Takes every weight of the checkpoint; returns the names of the parameters that got one."""
        parameters = dict(self.named_parameters())
        modules = dict(self.named_modules())
        loaded = set()
        for name, weight in weights:
            if name not in parameters:
                raise ConfigError(f"the checkpoint has {name!r}, which the model does not")
            owner = modules[name.rpartition(".")[0]]
            if isinstance(owner, ParallelLMHead):
                owner.weight_loader(parameters[name], weight)
            else:
                owner.load(weight)
            loaded.add(name)
        return loaded
