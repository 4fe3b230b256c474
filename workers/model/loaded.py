"""Which kernels compute a model here: the C++ ones where processor, compiler, model and settings allow, else torch's.

The choice is made once, at start; ``kernels`` of what is loaded says in words what it was, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from baton.engine.batch import Sampled, StepRow
from baton.kernels.native import NativeUnavailable, Team, load
from baton.workers.cache import KvPool
from baton.workers.model.config import ModelConfig
from baton.workers.model.native_steps import NativeSteps
from baton.workers.model.packed import WEIGHTS, load_packed, unfit
from baton.workers.model.paths import cache_directory
from baton.workers.model.torch_steps import TorchSteps
from baton.workers.model.weights import load_model, model_config

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Kernels = Literal["auto", "native", "torch"]


class KernelsUnavailable(Exception):
    """What was asked for cannot be computed here; one line that says what and why."""


class Steps(Protocol):
    """What computes steps: ``launch`` begins one, ``collect`` waits for it, in the same order.

    Where it is ``asynchronous`` a step may be launched before the ones before it were collected. A row that decodes
    takes memory for as many blocks as ``padded`` says, see ``kernels.reference.padded_blocks``.
    """

    asynchronous: bool

    def launch(self, rows: Sequence[StepRow], layers: int | None = None) -> Any: ...  # a handle, its own
    def collect(self, launched: Any) -> list[Sampled]: ...
    def padded(self, keys: int, block_size: int, /) -> int: ...
    def phases_s(self) -> dict[str, float]: ...  # seconds by part of a step since last asked, where that is known


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights, before it has a pool; ``steps`` makes what computes it over one, for so many ids."""

    config: ModelConfig
    digest: str
    weights_bytes: int
    kernels: str
    steps: Callable[[KvPool, int], Steps]


def load_for(path: Path, *, dtype: str, weights: str, kernels: Kernels, device: torch.device, threads: int) -> Loaded:
    """Load the weights of a GGUF for the best kernels there are. Raises ``ModelFileError``, ``KernelsUnavailable``."""
    if weights not in (*WEIGHTS, *DTYPES):
        raise KernelsUnavailable(f"there is no way of holding weights named {weights!r}; see --weights")
    try:
        if kernels == "torch":
            raise NativeUnavailable("torch was asked for")
        return _native(path, dtype, weights, device, threads)
    except NativeUnavailable as error:
        if kernels == "native":
            raise KernelsUnavailable(f"the C++ kernels cannot be used: {error}; see --kernels") from error
        if weights not in DTYPES:
            what = f"weights {weights} need the C++ kernels, which cannot be used"
            raise KernelsUnavailable(f"{what}: {error}; see --weights") from error
        reason = str(error)
    model = load_model(path, DTYPES[dtype], DTYPES[weights], device)
    return Loaded(
        model.config,
        model.weights.digest,
        model.weights.bytes,
        f"torch on {device}, {dtype} ({reason})",
        lambda pool, vocab: TorchSteps(model, pool, vocab),
    )


def _native(path: Path, dtype: str, weights: str, device: torch.device, threads: int) -> Loaded:
    """The C++ kernels; ``NativeUnavailable`` says why not."""
    if device.type != "cpu":
        raise NativeUnavailable(f"they do not compute on {device}")
    if dtype != "bfloat16":
        raise NativeUnavailable(f"they do not compute in {dtype}")
    if weights not in WEIGHTS:
        raise NativeUnavailable(f"they hold no weights in {weights}")
    if (reason := unfit(model_config(path))) is not None:
        raise NativeUnavailable(f"the model has {reason}")
    library = load(cache_directory("kernels"))
    team = Team(library, threads)
    packed = load_packed(path, weights)
    return Loaded(
        packed.config,
        packed.digest,
        packed.bytes,
        f"C++ on cpu, {weights} weights, {threads} threads",
        lambda pool, vocab: NativeSteps(packed, library, team, pool, vocab),
    )
