"""Style is a test: sizes, docstrings, and words and names that must not be in the source."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("engine", "ipc", "workers", "frontends", "kernels", "ops", "src/baton")
LINES_MAX = 400

#: what is meant to be done later, is not done
LATER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
#: a path of somebody's machine
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|Users|root|work|mnt|workspace|usr/local)/\w")
#: what runs, or rebuilds objects from, data
DANGEROUS = {"eval", "exec", "compile", "__import__"}
NO_NAMES = re.compile(r"(Manager|Handler|Utils?|Base|Mixin|Helper)$")


def tracked() -> list[Path]:
    """Every file that belongs to the repository or is about to, but not through the links in src."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in listed if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


TEXTS = [
    path for path in tracked() if path.suffix in {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".yml", ".yaml", ".html"}
]
SOURCES = [path for path in tracked() if path.suffix == ".py"]
PROGRAM = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in {part.split("/")[0] for part in CODE}]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.fixture(params=PROGRAM, ids=names(PROGRAM))
def program(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_a_file_is_one_thing_and_no_longer_than_that(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_MAX, f"{lines} lines: this is two things"


def test_nothing_is_left_for_later() -> None:
    here = Path(__file__)
    found = [str(path) for path in SOURCES if path != here and LATER.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    here = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in TEXTS
        if path != here
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_module_says_what_it_is(program: Path) -> None:
    text = program.read_text(encoding="utf-8")
    if text:
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


def test_every_public_class_and_function_says_what_it_does(program: Path) -> None:
    tree = ast.parse(program.read_text(encoding="utf-8"))
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_nothing_prints_and_nothing_runs_data(program: Path) -> None:
    tree = ast.parse(program.read_text(encoding="utf-8"))
    banned = DANGEROUS | {"print"}
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in banned
    }
    assert calls == set()


def test_names_say_what_a_class_is(program: Path) -> None:
    tree = ast.parse(program.read_text(encoding="utf-8"))
    vague = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and NO_NAMES.search(node.name)]
    assert vague == []
