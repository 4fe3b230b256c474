"""The shape of a model as its GGUF metadata gives it. Knows no tensor and no torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from baton.workers.model.gguf import Header, ModelFileError

ARCHITECTURES = ("llama",)
# Whatever else a family's metadata says (a sliding window, a logit scale) would change what is computed.
_UNDERSTOOD = frozenset(
    (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    )
)


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary angles are stretched; ``factors`` means a tensor divides each frequency (Llama 3)."""

    kind: Literal["none", "linear", "yarn", "factors"]
    factor: float = 1.0
    original_context: int = 0


class ModelConfig(msgspec.Struct, frozen=True):
    """The numbers a Llama-family model is built from; every one is positive and they fit one another."""

    architecture: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_embeddings: bool
    bos_id: int | None
    end_ids: tuple[int, ...]  # the ids that end a generation


def read_config(header: Header) -> ModelConfig:
    """Read the configuration from a header; raises ``ModelFileError`` naming what is missing, wrong or
    unsupported.
    """
    architecture = header.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            header.path, f"architecture {architecture!r} is not supported ({', '.join(ARCHITECTURES)} is)"
        )

    def count(name: str, default: int | None = None, most: int = 1 << 20) -> int:
        key = f"{architecture}.{name}"
        value = header.integer(key, default)
        if not 0 < value <= most:
            raise ModelFileError(header.path, f"metadata {key} is {value}, not within 1 and {most}")
        return value

    for key in header.values:
        family, _, name = key.partition(".")
        if family == architecture and name not in _UNDERSTOOD:
            raise ModelFileError(header.path, f"metadata {key} is not supported")
    if header.integer(f"{architecture}.expert_count", 0):
        raise ModelFileError(header.path, "mixtures of experts are not supported")
    embedding = header.tensors.get("token_embd.weight")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", max(hidden // heads, 1))
    config = ModelConfig(
        architecture=architecture,
        name=header.text("general.name", header.path.stem),
        layers=count("block_count", most=4096),
        hidden=hidden,
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=count("feed_forward_length"),
        vocab=count("vocab_size", embedding.shape[0] if embedding else None, most=1 << 22),
        context_length=count("context_length", most=1 << 24),
        rms_eps=_positive(header, f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=_positive(header, f"{architecture}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(header, architecture),
        tied_embeddings="output.weight" not in header.tensors,
        bos_id=header.integer(key) if (key := "tokenizer.ggml.bos_token_id") in header.values else None,
        end_ids=_end_ids(header),
    )
    faults = {
        "heads are not a multiple of kv heads": config.heads % config.kv_heads != 0,
        "the head size is odd": head_dim % 2 != 0,
        "keys and values of different sizes are not supported": count("attention.value_length", head_dim) != head_dim,
        "partial rotary embeddings are not supported": count("rope.dimension_count", head_dim) != head_dim,
        "a bos or end id is outside the vocabulary": not all(
            0 <= i < config.vocab for i in (*config.end_ids, config.bos_id or 0)
        ),
    }
    for fault, found in faults.items():
        if found:
            raise ModelFileError(header.path, fault)
    return config


def _positive(header: Header, key: str, default: float | None = None) -> float:
    value = header.number(key, default)
    if not (math.isfinite(value) and value > 0):
        raise ModelFileError(header.path, f"metadata {key} is {value}, not a positive number")
    return value


def _end_ids(header: Header) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(header.integer(key) for key in keys if key in header.values))


def _rope_scaling(header: Header, architecture: str) -> RopeScaling:
    prefix = f"{architecture}.rope.scaling"
    kind = header.text(f"{prefix}.type", "none")
    factors = "rope_freqs.weight" in header.tensors
    if kind not in ("none", "linear", "yarn") or (factors and kind != "none"):
        raise ModelFileError(header.path, f"rotary scaling {kind!r} is not supported (none, linear and yarn are)")
    if kind == "none":
        return RopeScaling("factors" if factors else "none")
    factor = _positive(header, f"{prefix}.factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = header.integer(f"{prefix}.original_context_length")
    if factor < 1 or not 0 < original <= 1 << 24:
        raise ModelFileError(header.path, f"yarn scaling by {factor} of a context of {original} makes no sense")
    return RopeScaling("yarn", factor, original)
