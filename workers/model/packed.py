"""Weights as the C++ kernels want them: converted from a GGUF once, then read from a cache into huge pages.

What ``--weights`` says decides how a matrix is held: ``bfloat16``, ``int8`` with a scale a row, or ``native``, which
keeps what a GGUF holds in blocks of 4 or 8 bits (Q4_0, Q4_1, Q8_0) and holds all else in bfloat16. Knows no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.kernels.native import ABI, HEAD_DIMS, PANEL
from baton.kernels.packing import Blocks, interleave, kind_of, pack, stack
from baton.workers.model.config import ModelConfig
from baton.workers.model.gguf import Header
from baton.workers.model.weights import Reader, converted_weights, unpermutation

WEIGHTS = ("bfloat16", "int8", "native")
KINDS = ("bf16", "int8", "q8", "q4")  # by BatonKind
GROUP_INPUTS = 32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """``panels`` are bytes ``[panels, bytes of a panel]``; ``kind`` is a ``BatonKind``."""

    kind: int
    panels: Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A model's weights; ``vectors`` are float32 and by name, as ``matrices`` are."""

    config: ModelConfig
    embedding: Tensor  # bfloat16 [vocab, hidden]
    vectors: dict[str, Tensor]
    matrices: dict[str, PackedMatrix]
    digest: str

    @property
    def bytes(self) -> int:
        """What they take in memory."""
        tensors = [self.embedding, *self.vectors.values(), *(matrix.panels for matrix in self.matrices.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def unfit(config: ModelConfig) -> str | None:
    """Why the C++ kernels cannot compute such a model; None where they can."""
    if config.head_dim not in HEAD_DIMS:
        return f"heads of {config.head_dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    for name in ("hidden", "intermediate"):
        if getattr(config, name) % PANEL:
            return f"{name} of {getattr(config, name)}, not a multiple of {PANEL}"
    if config.heads * config.head_dim % GROUP_INPUTS:
        return f"{config.heads} heads of {config.head_dim}, together not a multiple of {GROUP_INPUTS}"
    return None


def load_packed(path: Path, weights: str) -> PackedWeights:
    """The weights of a GGUF, held as ``weights`` says. Raises ``ModelFileError``."""
    converted = converted_weights(
        path, f"packed {weights} {ABI}", lambda header, config: _convert(header, config, weights), resident=True
    )
    tensors = converted.tensors
    matrices, vectors = dict[str, PackedMatrix](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        plain, _, kind = name.partition(":")
        if kind:
            matrices[plain] = PackedMatrix(KINDS.index(kind), tensor)
        elif name != "embedding":
            vectors[name] = tensor
    return PackedWeights(converted.config, tensors["embedding"], vectors, matrices, converted.digest)


def _convert(header: Header, config: ModelConfig, weights: str) -> Iterator[tuple[str, Tensor]]:
    read = Reader(header)

    def vector(name: str) -> Tensor:
        values = read(name)
        return values if weights == "native" else values.to(torch.bfloat16).float()  # as the other kernels hold it

    def matrix(name: str, *sources: str, order: Tensor | None = None) -> tuple[str, Tensor]:
        """Matrices under one another, then in another ``order`` of rows; in blocks where all have them of one kind."""
        blocks = [read.blocks(source) for source in sources] if weights == "native" else []
        weight: Tensor | Blocks
        if blocks and all(blocks) and len({block.kind for block in blocks if block is not None}) == 1:
            weight = stack([block for block in blocks if block is not None])
            weight = weight if order is None else weight.rows(order)
        else:
            weight = torch.cat([read(source) for source in sources])
            weight = weight if order is None else weight[order]
        kind = kind_of(weights, weight)
        return f"{name}:{KINDS[kind]}", pack(kind, weight)

    shared = config.kv_heads * config.head_dim
    queries = config.heads * config.head_dim
    heads = torch.cat(
        (
            unpermutation(config.heads, config.head_dim),
            unpermutation(config.kv_heads, config.head_dim) + queries,
            torch.arange(shared) + queries + shared,
        )
    )
    yield "embedding", read("token_embd.weight").to(torch.bfloat16)
    yield matrix("head", "token_embd.weight" if config.tied_embeddings else "output.weight")
    yield "norm", vector("output_norm.weight")
    if config.rope_scaling.kind == "factors":
        yield "rope_factors", read("rope_freqs.weight")
    for index in range(config.layers):
        source = f"blk.{index}."
        yield f"{index}.attn_norm", vector(source + "attn_norm.weight")
        projections = (source + f"attn_{which}.weight" for which in "qkv")
        yield matrix(f"{index}.qkv", *projections, order=heads)
        yield matrix(f"{index}.out", source + "attn_output.weight")
        yield f"{index}.ffn_norm", vector(source + "ffn_norm.weight")
        gate_up = source + "ffn_gate.weight", source + "ffn_up.weight"
        yield matrix(f"{index}.gate_up", *gate_up, order=interleave(config.intermediate))
        yield matrix(f"{index}.down", source + "ffn_down.weight")
