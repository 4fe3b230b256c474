"""The C++ kernels of ``kernels/cpu``: built once with the machine's compiler, loaded, and called through ctypes.

The library is kept in the user's cache under a name made of its source, the compiler and the processor's abilities, so
that another of any is another file. Knows no model file and no request.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_uint64, c_void_p
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "cpu"
ABI = 1  # BATON_ABI of cpu/abi.h
PANEL = 32
BLOCK_TOKENS = 16
HEAD_DIMS = (64, 80, 128, 256)
BF16, INT8, Q8, Q4 = range(4)  # BatonKind
PHASES = ("embed", "qkv", "attention", "output", "gate and up", "down", "head")  # BatonPhase
#: what the instructions used need, as /proc/cpuinfo names it
NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
#: GCC warns of its own headers' undefined operands
COMPILE = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")
BUILD_S_MAX = 120
DIGEST_BYTES = 32  # at the end of a library's file


class NativeUnavailable(Exception):
    """The library cannot be had here; one line that says why."""


class Matrix(Structure):
    """``BatonMatrix``."""

    _fields_ = (("kind", c_int32), ("out", c_int32), ("in_", c_int32), ("reserved", c_int32), ("panels", c_void_p))


class Layer(Structure):
    """``BatonLayer``."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Model(Structure):
    """``BatonModel``."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")),
        ("reserved", c_int32),
        ("rms_eps", c_float),
        ("rope_scale", c_float),
        ("embedding", c_void_p),
        ("rope_frequencies", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        ("layer", POINTER(Layer)),
    )


class Draw(Structure):
    """``BatonDraw``."""

    _fields_ = (
        ("number", c_double),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
    )


class Choice(Structure):
    """``BatonChoice``."""

    _fields_ = (("token", c_int32), ("logprob", c_float), ("log_normaliser", c_float), ("finite", c_int32))


class Step(Structure):
    """``BatonStep``."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "parts", "wanted", "layers", "vocab", "reserved")),
        *((name, c_void_p) for name in ("ids", "part", "blocks", "rows", "draw", "logits", "choice")),
        ("workspace", c_void_p),
        ("seconds", c_void_p),
    )


_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "baton_abi": (c_int32, ()),
    "baton_team_open": (c_void_p, (c_int32,)),
    "baton_team_close": (None, (c_void_p,)),
    "baton_workspace_bytes": (c_uint64, (POINTER(Model), c_int32, c_int32, c_int32)),
    "baton_step": (None, (c_void_p, POINTER(Model), POINTER(Step))),
    "baton_head": (None, (c_void_p, POINTER(Model), POINTER(Step))),
    "baton_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_float)),
    "baton_rope_store": (None, (c_void_p, POINTER(Model), POINTER(Step), c_int32)),
    "baton_attention": (None, (c_void_p, c_void_p, c_void_p, POINTER(Model), POINTER(Step), c_int32)),
    "baton_linear": (None, (c_void_p, POINTER(Matrix), c_void_p, c_void_p, c_int32, c_void_p)),
    "baton_silu_linear": (None, (c_void_p, POINTER(Matrix), c_void_p, c_void_p, c_int32, c_void_p)),
    "baton_choose": (None, (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p)),
    "baton_probe_reads": (c_double, (c_void_p, c_void_p, c_uint64)),
    "baton_probe_sums": (c_double, (c_int32,)),
    "baton_linear_workspace_bytes": (c_uint64, (POINTER(Matrix), c_int32)),
}


def missing_flags() -> list[str]:
    """Which instructions this processor lacks."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return list(NEEDED_FLAGS)
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return [flag for flag in NEEDED_FLAGS if flag not in flags]


def load(cache: Path, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library, built in ``cache`` if it is not there yet; see ``built``. Raises ``NativeUnavailable``."""
    try:
        library = ctypes.CDLL(str(built(cache, extra)))
    except OSError as error:
        raise NativeUnavailable(f"the kernels do not load: {error}") from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    assert library.baton_abi() == ABI, "kernels/native.py and cpu/abi.h disagree"
    return library


def built(cache: Path, extra: tuple[str, ...] = ()) -> Path:
    """The library's file, made if it is not there whole; ``extra`` are further flags for compiler and linker.

    Raises ``NativeUnavailable`` where the processor or the compiler does not do.
    """
    if missing := missing_flags():
        raise NativeUnavailable(f"this processor has no {', '.join(missing)}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NativeUnavailable(f"there is no C++ compiler {os.environ.get('CXX', 'g++')!r}")
    path = cache / f"baton-cpu-{_key(compiler, extra)}.so"
    if not _is_whole(path):
        _build(compiler, path, extra)
    return path


def _key(compiler: str, extra: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((COMPILE, extra)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = _call([compiler, "--version"])
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    digest.update(version.encode() + cpu.encode())
    return digest.hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was built: one cut short would not fail to load, but kill the process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _build(compiler: str, path: Path, extra: tuple[str, ...]) -> None:
    """Compile the files side by side, link them and rename the result into place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as directory:
            sources = sorted(SOURCE.glob("*.cpp"))
            objects = [Path(directory) / f"{source.stem}.o" for source in sources]

            def compile_one(source: Path, target: Path) -> None:
                _call([compiler, *COMPILE, *extra, "-c", str(source), "-o", str(target)])

            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(compile_one, sources, objects))
            made = Path(directory) / path.name
            _call([compiler, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(made)])
            with made.open("r+b") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)  # which the loader does not look at
            os.replace(made, path)
    except OSError as error:
        raise NativeUnavailable(f"the kernels cannot be built in {path.parent}: {error.strerror}") from error


def _call(command: list[str]) -> str:
    """What a command says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_S_MAX)
    except OSError as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"the compiler took more than {BUILD_S_MAX} s") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise NativeUnavailable(f"{command[0]} failed: {first}")
    return done.stdout


class Team:
    """Threads that compute together. Invariant: used by one caller at a time."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """Start them; raises ``NativeUnavailable``."""
        self.threads = threads
        self._library = library
        self.handle: int | None = library.baton_team_open(threads)
        if self.handle is None:
            raise NativeUnavailable(f"{threads} threads cannot be had")

    def close(self) -> None:
        """End the threads; once is enough."""
        if self.handle is not None:
            self._library.baton_team_close(self.handle)
            self.handle = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter anything may be gone
            self.close()
