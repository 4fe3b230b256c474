"""What the docs say about the program is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.engine.states import STATES
from baton.ops.cli import cli
from baton.ops.docs import derived, main, states_page

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: a file of the repository, as the docs name it
NAMED = re.compile(r"`((?:engine|ipc|workers|frontends|kernels|ops|docs|tests)/[\w/.]+\.(?:py|md))`")
#: a test, as the docs name it: its file and its function
TESTS = re.compile(r"`(tests/[\w/.]+\.py)::(\w+)`")


@pytest.mark.parametrize("name", list(derived()))
def test_what_is_derived_from_the_program_is_up_to_date(tmp_path: Path, name: str) -> None:
    main(tmp_path)
    fresh = (tmp_path / name).read_text(encoding="utf-8")
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == fresh, "run: make docs"


def test_the_page_names_every_state() -> None:
    assert all(f"| `{name}` |" in states_page() for name in STATES)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_file_a_page_names_is_there(page: Path) -> None:
    missing = [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_test_a_page_names_is_there(page: Path) -> None:
    missing = [
        (file, name)
        for file, name in TESTS.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_dependency_has_its_line() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[0]
    wanted = re.findall(r'"([a-z][a-z0-9-]+)(?:>=|==)', project.partition("[project]")[2])
    assert [name for name in wanted if f"**{name}**" not in text] == []


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in cli.commands if f"baton {name}" not in text] == []
