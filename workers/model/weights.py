"""Loading a model: GGUF tensors are dequantised, rounded and fused once, then mapped from a cache.

This is the one seam between model files and the model. Everything wrong with a file is a ``ModelFileError``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.kernels.packing import Blocks
from baton.workers.model.config import ModelConfig, read_config
from baton.workers.model.converted import FORMAT_VERSION, Converted, map_converted, write_converted
from baton.workers.model.gguf import Header, ModelFileError, TensorEntry, read_header
from baton.workers.model.llama import LayerWeights, Llama, LlamaWeights
from baton.workers.model.paths import cache_directory


def load_model(path: Path, compute_dtype: torch.dtype, weights_dtype: torch.dtype, device: torch.device) -> Llama:
    """Load a GGUF model whose weights are rounded to and held in ``weights_dtype``, computing in
    ``compute_dtype``.

    The first load converts (seconds) and leaves a file in the user's cache directory; later loads map that
    file after checking its digest. With float32 computation over bfloat16 weights all activations, keys,
    values, sums and logits are float32; the price is widening the weights again every step (see
    ``layers.Products``).
    """
    converted = converted_weights(
        path, str(weights_dtype), lambda header, config: _convert(header, config, weights_dtype)
    )
    config = converted.config
    tensors = {name: tensor.to(device) for name, tensor in converted.tensors.items()}
    layers = tuple(
        LayerWeights(**{name: tensors[f"{index}.{name}"] for name in LayerWeights.__slots__})
        for index in range(config.layers)
    )
    weights = LlamaWeights(
        embedding=tensors["embedding"],
        head=tensors.get("head", tensors["embedding"]),
        norm=tensors["norm"],
        rope_factors=tensors.get("rope_factors"),
        layers=layers,
        digest=converted.digest,
    )
    return Llama(config, weights, compute_dtype)


def converted_weights(
    path: Path,
    kind: str,
    convert: Callable[[Header, ModelConfig], Iterable[tuple[str, Tensor]]],
    *,
    resident: bool = False,
) -> Converted:
    """What ``convert`` makes of a GGUF, from the cache where it was made before. ``kind`` names it there."""
    cached = _cache_path(path, kind)
    converted = map_converted(cached, resident=resident)
    if converted is None:
        header = read_header(path)
        config = read_config(header)
        _check_tensors(header, config)
        try:
            write_converted(cached, config, convert(header, config))
        except OSError as error:
            raise ModelFileError(cached, f"cannot write the converted weights: {error.strerror}") from error
        converted = map_converted(cached, resident=resident)
        if converted is None:
            raise ModelFileError(cached, "the converted weights do not read back as written")
    return converted


def model_config(path: Path) -> ModelConfig:
    """The configuration of a GGUF alone. Raises ``ModelFileError``."""
    return read_config(read_header(path))


def _cache_path(path: Path, kind: str) -> Path:
    try:
        state = path.stat()
    except OSError as error:
        raise ModelFileError(path, (error.strerror or str(error)).lower()) from error
    identity = (str(path.resolve()), state.st_size, state.st_mtime_ns, kind, FORMAT_VERSION)
    return cache_directory("weights") / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.weights"


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the file must hold, and no other, with its shape."""
    hidden, queries = config.hidden, config.heads * config.head_dim
    shared = config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab, hidden)
    if config.rope_scaling.kind == "factors":
        shapes["rope_freqs.weight"] = (config.head_dim // 2,)
    for index in range(config.layers):
        shapes |= {
            f"blk.{index}.attn_norm.weight": (hidden,),
            f"blk.{index}.attn_q.weight": (queries, hidden),
            f"blk.{index}.attn_k.weight": (shared, hidden),
            f"blk.{index}.attn_v.weight": (shared, hidden),
            f"blk.{index}.attn_output.weight": (hidden, queries),
            f"blk.{index}.ffn_norm.weight": (hidden,),
            f"blk.{index}.ffn_gate.weight": (config.intermediate, hidden),
            f"blk.{index}.ffn_up.weight": (config.intermediate, hidden),
            f"blk.{index}.ffn_down.weight": (hidden, config.intermediate),
        }
    return shapes


def _check_tensors(header: Header, config: ModelConfig) -> None:
    """Hold the table of tensors against the configuration and the file's length before allocating."""
    expected = _shapes(config)
    for name in header.tensors:
        if name not in expected:
            raise ModelFileError(header.path, f"tensor {name} has no place in a {config.architecture} model")
    for name, shape in expected.items():
        entry = header.tensors.get(name)
        if entry is None:
            raise ModelFileError(header.path, f"tensor {name} is missing")
        if entry.shape != shape:
            raise ModelFileError(header.path, f"tensor {name} has shape {entry.shape}, not {shape}")
        if header.data_offset + entry.offset + _stored_bytes(header.path, name, entry) > header.file_bytes:
            raise ModelFileError(header.path, f"truncated: tensor {name} ends beyond the file")


def _stored_bytes(path: Path, name: str, entry: TensorEntry) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
    except (KeyError, ValueError) as error:
        raise ModelFileError(path, f"tensor {name} has the unknown storage type {entry.kind}") from error
    if entry.shape[-1] % block:
        raise ModelFileError(path, f"tensor {name} has rows of {entry.shape[-1]}, not a multiple of {block}")
    elements = 1
    for extent in entry.shape:
        elements *= extent
    return elements // block * size


def _convert(header: Header, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``LlamaWeights`` by name, one at a time, so that only the largest is ever held in
    float32.
    """
    read = Reader(header)

    def matrix(*parts: Tensor) -> Tensor:
        return torch.cat(parts).t().to(dtype).contiguous()

    yield "embedding", read("token_embd.weight").to(dtype)
    if not config.tied_embeddings:
        yield "head", read("output.weight").to(dtype)
    yield "norm", read("output_norm.weight").to(dtype)
    if config.rope_scaling.kind == "factors":
        yield "rope_factors", read("rope_freqs.weight")
    for index in range(config.layers):
        source = f"blk.{index}."
        query = read(source + "attn_q.weight")[unpermutation(config.heads, config.head_dim)]
        key = read(source + "attn_k.weight")[unpermutation(config.kv_heads, config.head_dim)]
        yield f"{index}.attn_norm", read(source + "attn_norm.weight").to(dtype)
        yield f"{index}.qkv", matrix(query, key, read(source + "attn_v.weight"))
        yield f"{index}.out", matrix(read(source + "attn_output.weight"))
        yield f"{index}.ffn_norm", read(source + "ffn_norm.weight").to(dtype)
        yield f"{index}.gate_up", matrix(read(source + "ffn_gate.weight"), read(source + "ffn_up.weight"))
        yield f"{index}.down", matrix(read(source + "ffn_down.weight"))


def unpermutation(heads: int, head_dim: int) -> Tensor:
    """GGUF's llama files pair neighbouring rows for rotation; the kernels pair row i with i + head_dim/2."""
    return torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)


class Reader:
    """Reads tensors of a file whose table has been checked."""

    def __init__(self, header: Header) -> None:
        import numpy

        self._header = header
        self._bytes: Any = numpy.memmap(header.path, numpy.uint8, "r")  # Any: numpy's array types say nothing here

    def __call__(self, name: str) -> Tensor:
        """float32, dequantised."""
        from gguf.quants import dequantize

        kind, stored = self._stored(name)
        entry = self._header.tensors[name]
        try:
            values = dequantize(stored, kind)
        except NotImplementedError as error:
            raise ModelFileError(self._header.path, f"tensor {name}: {kind.name} cannot be dequantised") from error
        tensor = torch.from_numpy(values.copy()).float()
        self._check(name, tensor)
        return tensor.view(entry.shape)

    def blocks(self, name: str) -> Blocks | None:
        """A matrix in the blocks it comes in (llama.cpp, ``ggml-common.h``); None where the kernels know no such."""
        from gguf.constants import GGMLQuantizationType as Kind

        kind, stored = self._stored(name)
        if kind not in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
            return None
        rows = stored.shape[0]
        parts = torch.from_numpy(stored.copy()).view(rows, -1, {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}[kind])

        def half(at: int) -> Tensor:
            values = parts[:, :, at : at + 2].contiguous().view(torch.float16).view(rows, -1)
            self._check(name, values)
            return values

        d = half(0)
        if kind == Kind.Q8_0:
            return Blocks(parts[:, :, 2:].contiguous().view(torch.int8).view(rows, -1), d, None)
        m = half(2) if kind == Kind.Q4_1 else d * -8
        if not torch.isfinite(m).all():  # beyond float16
            return None
        nibbles = parts[:, :, -16:]
        return Blocks(torch.cat((nibbles & 15, nibbles >> 4), 2).view(rows, -1), d, m)

    def _stored(self, name: str) -> tuple[Any, Any]:
        """Its storage type, and its bytes in rows."""
        from gguf.constants import GGMLQuantizationType

        entry = self._header.tensors[name]
        begin = self._header.data_offset + entry.offset
        stored = self._bytes[begin : begin + _stored_bytes(self._header.path, name, entry)]
        return GGMLQuantizationType(entry.kind), stored.reshape(*entry.shape[:-1], -1)

    def _check(self, name: str, values: Tensor) -> None:
        if not torch.isfinite(values).all():
            raise ModelFileError(self._header.path, f"tensor {name} holds non-finite numbers")
