"""Who may import what, beyond what import-linter can say: packages with one place each, and a pure engine.

It reads the source, so imports inside functions count, and so does ``kernels``, which is no regular package.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "ipc", "workers", "frontends", "kernels", "ops")

#: package -> the modules that may import it
ONLY_IN = {
    "zmq": (
        "ipc.zmq_link",
        "frontends.zmq_gateway",
        "frontends.client.port",
        "frontends.client.keys",
        "frontends.client.connection",
    ),
    "torch": ("workers.gpu", "workers.runner", "workers.cache", "workers.sampler", "workers.model.*", "kernels.*"),
    "baton.kernels": ("workers.runner", "workers.cache", "workers.sampler", "workers.model.*", "kernels.*"),
    "tokenizers": ("workers.model.vocabulary", "workers.tokenizer"),
    "aiohttp": ("frontends.*",),
    "opentelemetry": ("ipc.otlp",),
    "prometheus_client": ("frontends.*",),
    "structlog": ("ipc.log",),
    "click": ("ops.*",),
    "rich": ("ops.*",),
    "psutil": ("ops.bench.compare.*",),
    "matplotlib": ("ops.bench.compare.plot",),
}
#: packages that nothing may import: each would bring in what the hot path keeps out, or can run what it reads
NOWHERE = ("pickle", "marshal", "shelve", "pydantic", "fastapi", "requests", "httpx")
#: what a core must not know: a clock, chance, files, processes, threads, sockets, loops
# fmt: off
NOT_IN_ENGINE = (
    "asyncio", "concurrent", "datetime", "io", "logging", "mmap", "multiprocessing", "numpy", "os",
    "pathlib", "random", "secrets", "selectors", "signal", "socket", "subprocess", "sys", "tempfile",
    "threading", "time", "torch", "uuid", "zmq",
)
# fmt: on


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every module's name without "baton.", and its tree."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, at any depth; relative imports begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or in it."""
    return name == package or name.startswith(f"{package}.")


def test_every_package_is_imported_only_where_it_belongs() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in sources()
        for name in imports(tree)
        for package, allowed in ONLY_IN.items()
        if within(name, package) and not any(fnmatch(module, pattern) for pattern in allowed)
    ]
    assert wrong == []


def test_some_packages_are_imported_nowhere() -> None:
    found = [
        (module, name) for module, tree in sources() for name in imports(tree) if any(within(name, n) for n in NOWHERE)
    ]
    assert found == []


def test_imports_are_absolute_and_by_the_installed_name() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in sources()
        for name in imports(tree)
        if name.startswith(".") or name.split(".")[0] in FOLDERS
    ]
    assert wrong == []


def test_the_engine_is_pure() -> None:
    wrong = []
    for module, tree in sources():
        if within(module, "engine"):
            wrong += [f"{module} imports {name}" for name in imports(tree) if name.split(".")[0] in NOT_IN_ENGINE]
    assert wrong == []


def test_the_vocabulary_imports_nothing_of_baton_but_its_own_parts() -> None:
    trees, parts = dict(sources()), ("ipc.addresses", "ipc.request")
    found = {name for name in imports(trees["ipc.frames"]) if within(name, "baton")}
    assert all(any(within(name, f"baton.{part}") for part in parts) for name in found) and found
    assert [name for part in parts for name in imports(trees[part]) if within(name, "baton")] == []


def test_kernels_import_only_kernels_and_arrays() -> None:
    allowed = ("baton.kernels", "torch", "triton", "numpy")
    wrong = []
    for module, tree in sources():
        if within(module, "kernels"):
            for name in imports(tree):
                standard = name.split(".")[0] in sys.stdlib_module_names
                if not standard and not any(within(name, package) for package in allowed):
                    wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_kernels_has_no_init_so_that_it_never_shadows_another_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("statement", ["import baton", "from baton import AsyncClient", "import baton.ops.cli"])
def test_what_a_client_imports_brings_in_neither_torch_nor_aiohttp(statement: str) -> None:
    heavy = {"torch", "aiohttp", "numpy", "tokenizers", "opentelemetry"}
    code = f"{statement}\nimport sys\nfound = {heavy!r} & set(sys.modules)\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("baton.frontends.process", {"aiohttp"}),
        ("baton.workers.tokenizer", set[str]()),  # its vocabulary's package comes with the vocabulary
        ("baton.workers.scheduler", set[str]()),
        ("baton.workers.detokenizer", set[str]()),
        ("baton.workers.gpu", set[str]()),  # torch comes with a runner that needs it
        ("baton.workers.supervisor", set[str]()),
    ],
)
def test_a_process_imports_only_what_its_role_needs(module: str, wanted: set[str]) -> None:
    heavy = {"torch", "numpy", "aiohttp", "tokenizers", "opentelemetry", "pydantic", "gguf", "safetensors", "rich"}
    code = f"import {module}, sys\nfrom baton.ipc.log import make_log\nmake_log('x', 'info')\n"
    code += f"found = {heavy - wanted!r} & set(sys.modules)\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
