"""Building and loading the C++ kernels: what can be wrong is one clear reason, and then torch computes."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.batch import Sampling, StepRow
from baton.kernels import native
from baton.kernels.native import BF16, NativeUnavailable, Team, load
from baton.workers.model.gguf import ModelFileError
from baton.workers.model.loaded import KernelsUnavailable
from baton.workers.runner import Runner
from tests.kernels.native_calls import Linear, randn, some_weight
from tests.workers.model.tiny import F32, Q8_0, Tiny

ROW = StepRow(0, [5, 6, 7], 0, [0], True, 0, Sampling(0.0, 1.0, 0, 0, ()))

#: writes down how it is called, and instead of linking copies a library that was built before
STAND_IN = """#!/bin/sh
echo "$@" >> "{calls}"
[ "$1" = --version ] && echo stand-in {version} && exit
for argument; do [ "$before" = -o ] && out=$argument; before=$argument; done
case " $* " in
  *" -shared "*) {link} cp "{library}" "$out" ;;
  *) : > "$out" ;;
esac
"""


class Compiler:
    """A compiler that takes no time; ``built`` is how often it was asked to link."""

    def __init__(self, directory: Path, library: ctypes.CDLL) -> None:
        self.path, self._calls, self._library = directory / "stand-in", directory / "calls", library
        self.write()

    def write(self, version: int = 1, link: str = "") -> None:
        """Make it another version, or have it do something before it links."""
        values = {"calls": self._calls, "library": self._library._name, "version": version, "link": link}
        script(self.path, STAND_IN.format(**values))

    @property
    def built(self) -> int:
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        return sum("-shared" in call for call in calls)


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def compiler(native_library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler(tmp_path, native_library)
    monkeypatch.setenv("CXX", str(stand_in.path))
    return stand_in


@pytest.fixture
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested comes after the question what the processor can do."""
    monkeypatch.setattr(native, "NEEDED_FLAGS", ())


def only_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_what_was_built_is_loaded_and_not_built_again(compiler: Compiler, tmp_path: Path) -> None:
    for _ in range(2):
        assert load(tmp_path / "cache").baton_abi() == native.ABI
    assert compiler.built == 1
    assert only_file(tmp_path / "cache").name.startswith("baton-cpu-")


def test_another_compiler_and_other_flags_build_another_library(compiler: Compiler, tmp_path: Path) -> None:
    load(tmp_path / "cache")
    load(tmp_path / "cache", ("-g",))
    compiler.write(version=2)
    load(tmp_path / "cache")
    assert compiler.built == len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize("damage", ["empty", "cut early", "cut in half", "cut late", "changed", "longer"])
def test_a_damaged_library_is_built_anew(compiler: Compiler, tmp_path: Path, damage: str) -> None:
    load(tmp_path / "cache")
    path = only_file(tmp_path / "cache")
    good = path.read_bytes()
    half = len(good) // 2
    bad = {
        "empty": b"",
        "cut early": good[:100],
        "cut in half": good[:half],
        "cut late": good[:-1],
        "changed": good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :],
        "longer": good + b"\0",
    }[damage]
    path.unlink()  # what is loaded must not change beneath us
    path.write_bytes(bad)
    assert load(tmp_path / "cache").baton_abi() == native.ABI
    assert compiler.built == 2
    assert path.read_bytes() == good


def test_a_damaged_library_that_cannot_be_built_anew_is_not_loaded(compiler: Compiler, tmp_path: Path) -> None:
    load(tmp_path / "cache")
    path = only_file(tmp_path / "cache")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])
    compiler.write(link="exit 1;")
    with pytest.raises(NativeUnavailable, match="stand-in failed"):
        load(tmp_path / "cache")


def test_two_processes_may_build_at_once(compiler: Compiler, tmp_path: Path) -> None:
    """Both have found nothing and are about to link before either is let go on."""
    for name in ("ready", "go"):
        os.mkfifo(tmp_path / name)
    compiler.write(link=f'echo > "{tmp_path}/ready"; read line < "{tmp_path}/go";')
    code = f"from pathlib import Path\nfrom baton.kernels.native import load\nload(Path({str(tmp_path / 'cache')!r}))"
    ready, go = (os.open(tmp_path / name, os.O_RDWR) for name in ("ready", "go"))
    building = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        for _ in building:
            os.read(ready, 1)
        os.write(go, b"\n\n")
        assert [process.wait() for process in building] == [0, 0]
    finally:
        for process in building:
            process.kill()
            process.wait()
        os.close(ready)
        os.close(go)
    assert compiler.built == 2
    assert only_file(tmp_path / "cache").suffix == ".so"
    load(tmp_path / "cache")
    assert compiler.built == 2


@pytest.mark.usefixtures("any_processor")
class TestUnavailable:
    """Each is a ``NativeUnavailable`` of one line, and leaves nothing behind."""

    def check(self, cache: Path, reason: str) -> None:
        with pytest.raises(NativeUnavailable, match=reason) as caught:
            load(cache)
        assert "\n" not in str(caught.value)
        assert not cache.is_dir() or list(cache.iterdir()) == []

    def test_without_a_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        self.check(tmp_path / "cache", "there is no C\\+\\+ compiler 'no-such-compiler'")

    def test_with_a_compiler_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        says = 'echo "note: something" >&2; echo "x.cpp:3: error: out of registers" >&2; exit 1'
        text = f'#!/bin/sh\n[ "$1" = --version ] && exit\n{says}\n'
        monkeypatch.setenv("CXX", str(script(tmp_path / "failing", text)))
        self.check(tmp_path / "cache", "failing failed: x.cpp:3: error: out of registers$")

    def test_with_a_compiler_that_dies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", str(script(tmp_path / "dying", "#!/bin/sh\nkill -9 $$\n")))
        self.check(tmp_path / "cache", "dying failed")

    def test_with_a_compiler_that_is_no_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", str(script(tmp_path / "noise", "\x7fELF and then noise")))
        self.check(tmp_path / "cache", "noise cannot be run: Exec format error")

    def test_with_a_compiler_that_does_not_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(tmp_path / "never")
        endless = f'#!/bin/sh\n[ "$1" = --version ] && exit\nread line < "{tmp_path}/never"\n'
        monkeypatch.setenv("CXX", str(script(tmp_path / "endless", endless)))
        monkeypatch.setattr(native, "BUILD_S_MAX", 0.5)
        self.check(tmp_path / "cache", "the compiler took more than 0.5 s")

    def test_with_a_compiler_that_makes_no_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = '#!/bin/sh\nfor argument; do [ "$before" = -o ] && : > "$argument"; before=$argument; done\n'
        monkeypatch.setenv("CXX", str(script(tmp_path / "empty", text)))
        with pytest.raises(NativeUnavailable, match="the kernels do not load"):
            load(tmp_path / "cache")

    def test_with_a_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", str(script(tmp_path / "fine", "#!/bin/sh\n")))
        (tmp_path / "cache").write_text("a file where the directory should be")
        self.check(tmp_path / "cache", f"the kernels cannot be built in {tmp_path / 'cache'}: ")

    def test_on_a_processor_that_lacks_an_instruction(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "NEEDED_FLAGS", ("imagined", "dreamt"))
        self.check(tmp_path / "cache", "^this processor has no imagined, dreamt$")


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_teams_come_and_go(native_library: ctypes.CDLL) -> None:
    linear, x = Linear(native_library, BF16, some_weight(BF16, 200, 64)), randn(5, 64).bfloat16()
    before = threads()
    found = []
    for size in (1, 2, 3) * 4:
        team = Team(native_library, size)
        assert threads() == before + size - 1
        found.append(linear(team, x))
        team.close()
        team.close()
        assert team.handle is None and threads() == before
    assert all(torch.equal(one, found[0]) for one in found)


def test_threads_that_cannot_be_had_are_said_and_those_that_were_are_ended(native_library: ctypes.CDLL) -> None:
    code = f"""
import ctypes, resource
from pathlib import Path
from baton.kernels import native
library = ctypes.CDLL({native_library._name!r})
for name, (result, arguments) in native._PROTOTYPES.items():
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20),) * 2)
try:
    native.Team(library, 2000)
except native.NativeUnavailable as error:
    print(error, len(list(Path("/proc/self/task").iterdir())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2000 threads cannot be had 1\n"), done.stderr


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that fits the kernels, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return Tiny(heads=2, kv_heads=1, head_dim=64, kind=Q8_0).write(tmp_path / "m.gguf")


def runner(path: Path, **how: Any) -> Runner:
    return Runner(path, blocks=2, threads=1, **how)


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 96}, "heads of 96, not one of 64, 80, 128, 256"),
        ({"hidden": 48, "head_dim": 64}, "hidden of 48, not a multiple of 32"),
        ({"intermediate": 80, "head_dim": 64}, "intermediate of 80, not a multiple of 32"),
        ({"heads": 1, "kv_heads": 1, "head_dim": 80}, "1 heads of 80, together not a multiple of 32"),
    ],
    ids=str,
)
def test_a_model_that_does_not_fit_is_computed_by_torch(model: Path, changes: dict[str, Any], reason: str) -> None:
    Tiny(kind=F32, **changes).write(model)
    fallback = runner(model)
    assert fallback.kernels == f"torch on cpu, bfloat16 (the model has {reason})"
    assert fallback.step([ROW])[0].flags == 0
    with pytest.raises(KernelsUnavailable, match=f"the C\\+\\+ kernels cannot be used: the model has {reason}"):
        runner(model, kernels="native")
    with pytest.raises(KernelsUnavailable, match=f"weights int8 need the C\\+\\+ kernels, .*: the model has {reason}"):
        runner(model, weights="int8")


@pytest.mark.usefixtures("any_processor")
def test_without_the_library_torch_computes_what_it_can(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    fallback, reason = runner(model), "there is no C\\+\\+ compiler 'no-such-compiler'"
    assert fallback.kernels == "torch on cpu, bfloat16 (there is no C++ compiler 'no-such-compiler')"
    assert fallback.step([ROW])[0].flags == 0
    with pytest.raises(KernelsUnavailable, match=f"{reason}; see --kernels"):
        runner(model, kernels="native")
    for weights in ("int8", "native"):
        with pytest.raises(KernelsUnavailable, match=f"weights {weights} need .*{reason}; see --weights"):
            runner(model, weights=weights)


@pytest.mark.usefixtures("any_processor")
def test_what_the_kernels_do_not_compute_is_said(model: Path) -> None:
    for how, reason in (
        ({"dtype": "float32"}, "they do not compute in float32"),
        ({"weights": "float32"}, "they hold no weights in float32"),
    ):
        with pytest.raises(KernelsUnavailable, match=reason):
            runner(model, kernels="native", **how)
        assert reason in runner(model, **how).kernels
    assert runner(model, kernels="torch").kernels == "torch on cpu, bfloat16 (torch was asked for)"


@pytest.mark.parametrize("kernels", ["auto", "native", "torch"])
def test_a_file_that_is_no_model_is_the_files_fault(model: Path, kernels: str) -> None:
    model.write_bytes(b"no model")
    with pytest.raises(ModelFileError):
        runner(model, kernels=kernels)


def test_a_team_that_was_closed_computes_nothing_more(compiler: Compiler, model: Path) -> None:
    closed, other = runner(model, kernels="native"), runner(model, kernels="native")
    expected = closed.step([ROW])
    closed._steps._model._team.close()  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        closed.step([ROW])
    assert other.step([ROW]) == expected
    assert compiler.built == 1
