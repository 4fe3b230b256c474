"""A GGUF model small enough to write for every test, and the same model computed the plainest way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from baton.workers.model.vocabulary import byte_alphabet

Q8_0, Q4_0, Q4_1, Q6_K, F32, F16 = (
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q4_1,
    gguf.GGMLQuantizationType.Q6_K,
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
)


@dataclass
class Tiny:
    """What the file is written from; a test changes a field or two."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    tied: bool = True
    kind: gguf.GGMLQuantizationType = Q8_0
    kinds: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)  # such as of all attn_v
    factors: list[float] | None = None
    scaling: dict[str, object] = field(default_factory=dict)
    pre: str = "smollm"
    tokenizer: str = "gpt2"
    numbers: dict[str, int] = field(default_factory=dict)  # further metadata
    spare: str | None = None  # a tensor too many
    seed: int = 0
    padding: int = 0  # ids that stand for nothing, at the end of the table

    @property
    def tokens(self) -> list[str]:
        padding = [f"[PAD{number}]" for number in range(self.padding)]
        return ["<|end|>", "<|start|>", *byte_alphabet(), "he", "ll", "hell", *padding]

    def tensors(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(self.seed)

        def normal(*shape: int) -> np.ndarray:
            return np.asarray(random.standard_normal(shape) / np.sqrt(shape[-1]), np.float32)

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = {"token_embd.weight": normal(len(self.tokens), self.hidden) * 8}
        out["output_norm.weight"] = 1 + normal(self.hidden)
        if not self.tied:
            out["output.weight"] = normal(len(self.tokens), self.hidden)
        if self.factors:
            out["rope_freqs.weight"] = np.array(self.factors, np.float32)
        for i in range(self.layers):
            out |= {
                f"blk.{i}.attn_norm.weight": 1 + normal(self.hidden),
                f"blk.{i}.attn_q.weight": normal(q, self.hidden) * 3,
                f"blk.{i}.attn_k.weight": normal(kv, self.hidden) * 3,
                f"blk.{i}.attn_v.weight": normal(kv, self.hidden),
                f"blk.{i}.attn_output.weight": normal(self.hidden, q),
                f"blk.{i}.ffn_norm.weight": 1 + normal(self.hidden),
                f"blk.{i}.ffn_gate.weight": normal(self.intermediate, self.hidden),
                f"blk.{i}.ffn_up.weight": normal(self.intermediate, self.hidden),
                f"blk.{i}.ffn_down.weight": normal(self.hidden, self.intermediate),
            }
        if self.spare:
            out[self.spare] = normal(self.hidden)
        return out

    def stored(self) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
        """What stands in the file for each tensor, and as what."""
        out = {}
        for name, data in self.tensors().items():
            kind = self.kinds.get(name.split(".")[-2], self.kind) if data.ndim == 2 else F32
            out[name] = (_some_q6_k(data.shape) if kind == Q6_K else quantize(data, kind), kind)
        return out

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_block_count(self.layers)
        writer.add_context_length(512)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.intermediate)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1000.0)
        writer.add_tokenizer_model(self.tokenizer)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types([3, 3] + [1] * (len(self.tokens) - 2 - self.padding) + [5] * self.padding)
        writer.add_token_merges(["h e", "l l", "he ll"])
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_chat_template("{{ messages[0].content }}")
        for name, number in self.numbers.items():
            writer.add_uint32(name, number)
        for name, value in self.scaling.items():
            key = f"{self.architecture}.rope.scaling.{name}"
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                assert isinstance(value, int)
                writer.add_uint32(key, value)
        for name, (data, kind) in self.stored().items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, ids: list[int], frequencies: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Float64 logits of the last id, straight from the file's row order: neighbours rotate."""
        w = {
            name: torch.from_numpy(dequantize(data, kind).copy()).double()
            for name, (data, kind) in self.stored().items()
        }
        if frequencies is None:
            frequencies = 1000.0 ** -(torch.arange(0, self.head_dim, 2).double() / self.head_dim)
            if self.factors:
                frequencies = frequencies / torch.tensor(self.factors).double()
        angles = torch.arange(len(ids))[:, None, None] * frequencies.double()

        def rotate(x: Tensor) -> Tensor:
            even, odd = x[..., 0::2], x[..., 1::2]
            cos, sin = angles.cos() * scale, angles.sin() * scale
            return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

        def norm(x: Tensor, name: str) -> Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

        x = w["token_embd.weight"][ids]
        for i in range(self.layers):
            h = norm(x, f"blk.{i}.attn_norm.weight")
            q = rotate((h @ w[f"blk.{i}.attn_q.weight"].T).view(len(ids), self.heads, -1))
            k = rotate((h @ w[f"blk.{i}.attn_k.weight"].T).view(len(ids), self.kv_heads, -1))
            v = (h @ w[f"blk.{i}.attn_v.weight"].T).view(len(ids), self.kv_heads, -1)
            heads = []
            for head in range(self.heads):
                shared = head * self.kv_heads // self.heads
                scores = q[:, head] @ k[:, shared].T / self.head_dim**0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
                heads.append(scores.softmax(-1) @ v[:, shared])
            x = x + torch.cat(heads, -1) @ w[f"blk.{i}.attn_output.weight"].T
            h = norm(x, f"blk.{i}.ffn_norm.weight")
            gate, up = h @ w[f"blk.{i}.ffn_gate.weight"].T, h @ w[f"blk.{i}.ffn_up.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ w[f"blk.{i}.ffn_down.weight"].T
        output = w["token_embd.weight" if self.tied else "output.weight"]
        return norm(x[-1], "output_norm.weight") @ output.T


def _some_q6_k(shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks of Q6_K, which nothing quantises to: 6 bits of 256 weights, 16 int8 scales, a float16."""
    random = np.random.default_rng(6)
    blocks = random.integers(0, 256, (shape[0], shape[1] // 256, 210), np.uint8)
    blocks[:, :, -2:] = np.frombuffer(np.float16(1e-4 / np.sqrt(shape[1] / 256)).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)
