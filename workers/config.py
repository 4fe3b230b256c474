"""The one typed configuration: what ``baton serve`` was told, resolved, and handed to every process unchanged.

It knows no flags and no environment (``ops.configure`` merges those); it only says what there is to set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from baton.engine.admission import Policy
from baton.engine.limits import Limits
from baton.engine.order import Order
from baton.ipc.frames import Address, Role

Count = Annotated[int, msgspec.Meta(ge=1)]
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a server can be told. Sizes are in bytes, times in seconds."""

    model: str = "smollm2-135m"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    origins: tuple[str, ...] = ()
    frontends: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    tokenizers: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    zmq: str | None = None
    zmq_curve_keys: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["bfloat16", "float32", "int8", "native"] = "bfloat16"
    kernels: Literal["auto", "native", "torch"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    kv_memory: str | None = None
    kv_blocks: Count | None = None
    swap_memory: str = "0"  # of the host, for the KV blocks of requests that gave way
    max_step_tokens: Count | None = None  # short for limits.step_tokens_max
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    niceness: Annotated[int, msgspec.Meta(ge=0, le=19)] = 5  # of all but worker and scheduler, against those two
    prefix_cache: bool = True
    share_prefixes: bool = False  # between tenants
    admission: Policy = "predicted"
    order: Order = "priority"
    itl_target_ms: Annotated[float, msgspec.Meta(ge=0)] = 25.0  # 0 is none
    worker: Literal["model", "scripted"] = "model"
    scripted_step_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    scripted_faulty_seed: Count | None = None  # the numbers of a request with this seed are not finite after a token
    run_directory: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    limits: Limits = Limits()


def contradicting(settings: Settings) -> tuple[str, str] | None:
    """Two settings of which one wants the C++ kernels and the other does not go with them; None where all agree.

    They compute on a CPU, in bfloat16, over weights that are not float32.
    """
    quantised = settings.weights in ("int8", "native")
    if settings.worker != "model" or not (quantised or settings.kernels == "native"):
        return None
    native = "weights" if quantised else "kernels"
    unfit = {"kernels": "torch", "dtype": "float32", "device": "cuda", "weights": "float32"}
    return next(((native, name) for name, value in unfit.items() if getattr(settings, name) == value), None)


def size_bytes(text: str) -> int:
    """The bytes meant by a size such as "512MiB", "4 GB" or "1073741824"; ValueError where it is none, or nothing."""
    number, unit = text.strip(), ""
    for at, char in enumerate(number):
        if not (char.isdigit() or char == "."):
            number, unit = number[:at], number[at:].strip().upper()
            break
    if unit not in UNITS:
        raise ValueError(f"no such unit: {unit!r}")
    size = int(float(number) * UNITS[unit])
    if size < 1:
        raise ValueError("a size must be positive")
    return size


def swap_bytes(settings: Settings) -> int:
    """The bytes of host memory that blocks may be swapped to; 0 is none."""
    text = settings.swap_memory
    return 0 if text.strip() == "0" else size_bytes(text)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What every process must know of the model being served; made once by the supervisor, before it starts any.

    ``vocab`` counts the ids that stand for something: what a client may name and the model may say. The model's table
    has ``vocab_padded`` rows; those beyond are padding.
    """

    name: str
    path: str
    vocab: int
    vocab_padded: int
    context_tokens_max: int
    end_ids: tuple[int, ...]
    weights_digest: str
    tokenizer_digest: str
    template_digest: str
    created: int


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is started with: who it is, where it meets the others, and the settings in force.

    ``doorbells`` maps "reader/ring" to an inherited eventfd; ``lifeline`` is a pipe whose end means the supervisor
    died.
    """

    role: int
    index: int
    incarnation: int
    directory: str
    settings: Settings
    card: Card
    doorbells: dict[str, int]
    lifeline: int
    epoch_offset_ns: int

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.directory)

    @property
    def address(self) -> Address:
        """Who the process is."""
        return Address(Role(self.role), self.card.name, 0, self.index, self.incarnation)
