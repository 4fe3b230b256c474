"""The command line parses, hands over, and says in one line what was wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import ModuleType

import pytest
from click.testing import CliRunner

from baton.ops.cli import SERVE_FLAGS, cli
from baton.ops.configure import known_settings
from baton.workers.config import Settings


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CONFIG", raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Puts a supervisor in place that only remembers what it was told."""
    told: list[Settings] = []
    supervisor = ModuleType("baton.workers.supervisor")

    def main(settings: Settings) -> int:
        told.append(settings)
        return 7

    supervisor.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "baton.workers.supervisor", supervisor)
    monkeypatch.setattr("baton.ops.fetch.ensure", lambda model: None)
    return told


def test_every_flag_of_serve_is_a_setting() -> None:
    assert {flag.removeprefix("--").replace("-", "_") for flag in SERVE_FLAGS} <= set(known_settings())


def test_serve_hands_the_settings_to_the_supervisor_and_ends_with_its_status(served: list[Settings]) -> None:
    result = CliRunner().invoke(cli, ["serve", "--worker", "scripted", "--port", "0"])
    assert result.exit_code == 7
    assert served == [Settings(worker="scripted", port=0)]


def test_a_bad_setting_is_one_line_on_stderr_and_status_2(served: list[Settings]) -> None:
    result = CliRunner().invoke(cli, ["serve", "--port", "http"])
    assert result.exit_code == 2
    assert result.stderr == "baton: --port: port must be an integer from 0 to 65535, got 'http'\n"
    assert served == []


def test_a_failed_start_is_one_line_and_status_1(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    def main(settings: Settings) -> int:
        raise OSError(f"port {settings.port} is taken\nby another")

    monkeypatch.setattr(sys.modules["baton.workers.supervisor"], "main", main)
    result = CliRunner().invoke(cli, ["serve", "--worker", "scripted"])
    assert result.exit_code == 1
    assert result.stderr == "baton: port 8000 is taken by another\n"


def test_a_missing_part_of_the_server_is_named_with_its_remedy(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "baton.workers.supervisor", None)
    result = CliRunner().invoke(cli, ["serve", "--worker", "scripted"])
    assert result.exit_code == 1
    assert "install baton-llm[serve]" in result.stderr and result.stderr.count("\n") == 1


def test_config_shows_values_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_THREADS", "2")
    table = CliRunner().invoke(cli, ["config", "--port", "9"]).stdout
    assert "BATON_THREADS" in table
    assert "limits.drain_s_max" in table
    shown = json.loads(CliRunner().invoke(cli, ["config", "--port", "9", "--json"]).stdout)
    assert shown["port"] == {"value": 9, "source": "--port"}
    assert shown["threads"] == {"value": 2, "source": "BATON_THREADS"}


def test_the_command_line_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys, baton.ops.cli; print({'torch', 'aiohttp', 'rich', 'zmq'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "set()\n"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "baton", "--help"], capture_output=True, check=True)
    assert time.perf_counter() - started < 3.0, "far over the 0.3 s it takes on an idle machine"
