"""The Llama family over a paged pool: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Touvron et al., LLaMA, 2023, section 2.2. It computes logits for tokens it is given; it knows no request, no
sampling and no file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import lean
from baton.kernels.reference import Ragged, padded_blocks, paged_attention, rms_norm, rope, silu_mul, store_kv
from baton.workers.cache import KvPool
from baton.workers.model.config import ModelConfig
from baton.workers.model.layers import TABLE_ROWS, Products
from baton.workers.model.rope import Rope


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are ``[in, out]``, query, key and value fused side by side, and so gate and up."""

    attn_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A whole model in the dtype its weights are held in; ``head`` is the embedding itself where they are
    tied.
    """

    embedding: Tensor  # [vocab, hidden]
    head: Tensor
    norm: Tensor
    rope_factors: Tensor | None
    layers: tuple[LayerWeights, ...]
    digest: str  # of the converted weights and the configuration

    @property
    def bytes(self) -> int:
        """What the weights take in memory."""
        tensors = [self.embedding, self.norm]
        tensors += [] if self.head is self.embedding else [self.head]
        tensors += [] if self.rope_factors is None else [self.rope_factors]
        tensors += [getattr(layer, name) for layer in self.layers for name in LayerWeights.__slots__]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Llama:
    """A model ready to compute: ``dtype`` is that of activations, keys and values; the residual sum is
    float32.
    """

    def __init__(self, config: ModelConfig, weights: LlamaWeights, dtype: torch.dtype) -> None:
        self.config, self.weights, self.dtype = config, weights, dtype
        self.device = weights.embedding.device
        self._rope = Rope(config, weights.rope_factors, self.device)
        widest = max(
            TABLE_ROWS * config.hidden,
            *(matrix.numel() for layer in weights.layers[:1] for matrix in (layer.qkv, layer.gate_up, layer.down)),
        )
        self._products = products = Products(widest, self.device, dtype)
        self._lean = products.packs and weights.embedding.dtype == dtype
        #: blocks gathered for a query, see ``reference.plan_ragged``
        self.padded = lean.quarter_blocks if self._lean else padded_blocks
        self._held = [
            tuple(products.hold(matrix) for matrix in (self._qkv(layer), layer.out, layer.gate_up, layer.down))
            for layer in weights.layers
        ]
        self._head = products.hold_table(weights.head)
        scale = math.sqrt(config.hidden) if self._lean else 1.0
        self._attn_norms = [layer.attn_norm.float() * scale for layer in weights.layers]
        self._ffn_norms = [layer.ffn_norm.float() * scale for layer in weights.layers]
        self._norm = weights.norm.float()

    def _qkv(self, layer: LayerWeights) -> Tensor:
        config = self.config
        if not self._lean:
            return layer.qkv
        return lean.interleaved(layer.qkv, config.heads + config.kv_heads, config.head_dim)

    def states(self, ids: Tensor, ragged: Ragged, pool: KvPool, layers: int | None = None) -> Tensor:
        """Compute a step: ``ids`` [tokens] enter the pool, the last layer's sums come back, float32 ``[tokens,
        hidden]``.

        ``layers`` are how many are computed, by default all: the first two take as much memory at once as all of them.
        """
        if self._lean:
            return self._lean_states(ids, ragged, pool, layers)
        keys, values = pool.keys, pool.values
        config, project, eps = self.config, self._products.project, self.config.rms_eps
        tokens, heads, kv_heads = ids.shape[0], config.heads, config.kv_heads
        cos, sin = self._rope.tables(ragged.positions)
        x = functional.embedding(ids, self.weights.embedding).float()
        for index, (fused, out, gate_up, down) in enumerate(self._held[:layers]):
            h = rms_norm(x, self._attn_norms[index], eps, self.dtype)
            qkv = project(h, fused).view(tokens, heads + 2 * kv_heads, config.head_dim)
            qk = rope(qkv[:, : heads + kv_heads], cos, sin)
            store_kv(qk[:, heads:], qkv[:, heads + kv_heads :], keys[index], values[index], ragged.slots)
            seen = paged_attention(qk[:, :heads], keys[index], values[index], ragged)
            x += project(seen.view(tokens, -1), out)
            h = rms_norm(x, self._ffn_norms[index], eps, self.dtype)
            x += project(silu_mul(project(h, gate_up)), down)
        return x

    def _lean_states(self, ids: Tensor, ragged: Ragged, pool: KvPool, layers: int | None) -> Tensor:
        """The same step in fewer operators, which are ``kernels.lean``'s."""
        config, project = self.config, self._products.project
        angles = self._rope.complex_table(ragged.positions)
        sizes = config.heads, config.hidden, config.intermediate
        step = lean.LeanStep(ragged, angles, pool.both[0], *sizes, config.rms_eps)
        step.states.copy_(functional.embedding(ids, self.weights.embedding))
        for index, (fused, out, gate_up, down) in enumerate(self._held[:layers]):
            qkv = project(step.normed(self._attn_norms[index]), fused)
            step.add(project(step.attention(qkv, pool.both[index]), out))
            h = project(step.normed(self._ffn_norms[index]), gate_up)
            step.add(project(step.silu_mul(h), down))
        return step.states

    def logits(self, states: Tensor, wanted: Tensor) -> Tensor:
        """float32 ``[wanted, vocab]`` of the tokens at these indices of a step's ``states``."""
        last = rms_norm(states.index_select(0, wanted), self._norm, self.config.rms_eps, self.dtype)
        return self._products.logits(last, self._head)
