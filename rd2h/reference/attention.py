"""Sparse multi-head latent attention: projections, indexer, caches and the connector's hooks of one layer."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size

from rd2h.errors import StateError
from rd2h.reference.batch import SparseBatch
from rd2h.reference.cache_layers import IndexerCacheLayer, MainCacheLayer
from rd2h.reference.config import ReferenceDsaConfig, selection_source
from rd2h.reference.hooks import LayerHooks, current_batch
from rd2h.reference.layers import Projection, RmsNorm, Shard, load
from rd2h.reference.rotary import Rotary


class KeyNorm(nn.Module):
    """Layer normalisation of the indexer's keys."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self._epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64), requires_grad=False)

    def load(self, weight: torch.Tensor) -> None:
        """Takes the weight."""
        load(self.weight, weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Same shape as ``features``."""
        return nn.functional.layer_norm(features, (features.shape[-1],), self.weight, None, self._epsilon)


class Indexer(nn.Module):
    """Selects the tokens that the layer attends to; the same on every tensor-parallel rank."""

    def __init__(self, config: ReferenceDsaConfig, prefix: str, vllm_config: VllmConfig) -> None:
        super().__init__()
        self._heads, self._dim, self._rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self._topk = config.index_topk
        self._rotary = Rotary(self._rope, config.rope_theta, interleaved=False)
        self.wq_b = Projection(config.q_lora_rank, self._heads * self._dim)
        self.wk = Projection(config.hidden_size, self._dim)
        self.k_norm = KeyNorm(self._dim, config.rms_norm_eps)
        self.weights_proj = Projection(config.hidden_size, self._heads)
        self.cache = IndexerCacheLayer(f"{prefix}.k_cache", self._dim, config.index_int8, vllm_config)

    def keys(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys of the step's tokens, [tokens, dim]."""
        return self._rotate(self.k_norm(self.wk(hidden)), positions)

    def select(
        self, batch: SparseBatch, hidden: torch.Tensor, query_latent: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Positions to attend to, int64[tokens, topk]; the step's keys must be in the cache."""
        queries = self._rotate(self.wq_b(query_latent).view(-1, self._heads, self._dim), positions)
        weights = self.weights_proj(hidden) * (self._heads * self._dim) ** -0.5
        return self.cache.store.select(batch, queries, weights, self._topk)

    def _rotate(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turned = self._rotary(features[..., : self._rope], positions)
        return torch.cat((turned, features[..., self._rope :]), dim=-1)


class SparseLatentAttention(nn.Module):
    """One layer's attention. Queries are multiplied into latent space, so that K of a token is its latent itself."""

    def __init__(self, config: ReferenceDsaConfig, layer: int, layers_prefix: str, vllm_config: VllmConfig) -> None:
        """Layer ``layer`` of those under ``layers_prefix``."""
        super().__init__()
        self._nope, self._rope, self._value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self._rank = config.kv_lora_rank
        self._heads = config.num_attention_heads // get_tensor_model_parallel_world_size()
        self._scale = (self._nope + self._rope) ** -0.5
        self._rotary = Rotary(self._rope, config.rope_theta, interleaved=True)
        all_heads = config.num_attention_heads
        self.q_a_proj = Projection(config.hidden_size, config.q_lora_rank)
        self.q_a_norm = RmsNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Projection(config.q_lora_rank, all_heads * (self._nope + self._rope), Shard.OUTPUT)
        self.kv_a_proj = Projection(config.hidden_size, self._rank + self._rope)
        self.kv_a_norm = RmsNorm(self._rank, config.rms_norm_eps)
        self.kv_b_proj = Projection(self._rank, all_heads * (self._nope + self._value), Shard.OUTPUT)
        self.o_proj = Projection(all_heads * self._value, config.hidden_size, Shard.INPUT)
        self.source_layer = selection_source(config, layer)
        self.indexer: Indexer | None = None
        if self.source_layer == layer:
            self.indexer = Indexer(config, f"{layers_prefix}.{layer}.self_attn.indexer", vllm_config)
        name, source_name = (f"{layers_prefix}.{each}.self_attn.attn" for each in (layer, self.source_layer))
        self.main = MainCacheLayer(name, source_name, self._rank, self._rope, vllm_config)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, selections: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Attention output [tokens, hidden]; ``selections`` holds the step's top-k by layer and is added to."""
        batch = current_batch(self.main.name)
        if batch is None:
            return torch.zeros_like(hidden)
        output = torch.zeros_like(hidden)
        real = slice(0, batch.num_tokens)
        output[real] = self._attend(batch, hidden[real], positions[real], selections)
        return output

    def _attend(
        self, batch: SparseBatch, hidden: torch.Tensor, positions: torch.Tensor, selections: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        hooks = LayerHooks.of(self.main.name)
        query_latent = self.q_a_norm(self.q_a_proj(hidden))
        latent, rope = self.kv_a_proj(hidden).split((self._rank, self._rope), dim=-1)
        latent, rope = self.kv_a_norm(latent), self._rotary(rope, positions)
        index_keys = self.indexer.keys(hidden, positions) if self.indexer is not None else None

        hooks.before_writes()
        self.main.store.append(batch, latent, rope)
        if self.indexer is not None and index_keys is not None:
            self.indexer.cache.store.append(batch, index_keys)
        hooks.written()

        if self.indexer is not None:
            selections[self.source_layer] = self.indexer.select(batch, hidden, query_latent, positions)
        if self.source_layer not in selections:
            raise StateError(f"{self.main.name!r} comes before the layer {self.source_layer} that selects for it")
        output = self._context(batch, query_latent, positions, selections[self.source_layer])
        hooks.done(self.main.kv_cache, batch)
        return output

    def _context(
        self, batch: SparseBatch, query_latent: torch.Tensor, positions: torch.Tensor, topk: torch.Tensor
    ) -> torch.Tensor:
        queries = self.q_b_proj(query_latent).view(-1, self._heads, self._nope + self._rope)
        nope, rope = queries.split((self._nope, self._rope), dim=-1)
        expansion = self.kv_b_proj.weight.view(self._heads, self._nope + self._value, self._rank)
        to_key, to_value = expansion.split((self._nope, self._value), dim=1)
        latent_queries = torch.einsum("thn,hnr->thr", nope, to_key)
        context = self.main.store.attend(batch, latent_queries, self._rotary(rope, positions), topk, self._scale)
        values = torch.einsum("thr,hvr->thv", context, to_value)
        output: torch.Tensor = self.o_proj(values.flatten(1))
        return output
