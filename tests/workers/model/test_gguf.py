"""Header reading: what is there is read, what is broken is one ``ModelFileError``, and never a large
allocation.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.workers.model.gguf import ModelFileError, read_header
from baton.workers.model.vocabulary import read_vocabulary
from baton.workers.model.weights import load_model
from tests.workers.model.tiny import Tiny

PEAK_BYTES_MAX = 8 << 20  # the tiny model's Python objects are about one


class Blob(bytes):
    """Bytes that do not flood a failing test's report."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Blob:
    return Blob(Tiny(layers=1).write(tmp_path_factory.mktemp("whole") / "tiny.gguf").read_bytes())


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_all(path: Path) -> None:
    """Everything the processes do with a model file."""
    tracemalloc.start()
    try:
        read_vocabulary(read_header(path))
        load_model(path, torch.float32, torch.float32, torch.device("cpu"))
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


def check_refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_all(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


def header_bytes(path: Path) -> int:
    return read_header(path).data_offset


def test_values_and_tensors_agree_with_the_gguf_package(tmp_path: Path) -> None:
    path = Tiny(factors=[1.0] * 8, numbers={"general.quantization_version": 2}).write(tmp_path / "m.gguf")
    header, reader = read_header(path), gguf.GGUFReader(path)
    for name, their_field in reader.fields.items():
        if not name.startswith("GGUF."):
            ours = header.values[name]
            assert (ours if isinstance(ours, str | int | float) else list(ours)) == their_field.contents(), name
    assert len(header.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (entry.kind, header.data_offset + entry.offset) == (tensor.tensor_type, tensor.data_offset)


def test_every_truncation_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    header = header_bytes(path)
    cuts = [
        *range(0, header, 37),
        header - 1,
        header,
        header + 1,
        (header + len(whole)) // 2,
        len(whole) - 64,
    ]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        check_refused(path)


def test_the_real_file_cut_anywhere_is_refused(tmp_path: Path, model_path: Path) -> None:
    with model_path.open("rb") as file:
        data = file.read(2_000_000)
    path = tmp_path / "cut.gguf"
    for cut in (100, 2_000, 50_000, 400_000, 900_000, 1_780_000, 1_790_000, 2_000_000):
        path.write_bytes(data[:cut])
        check_refused(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused_but_nothing_else(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    path = tmp_path / "flipped.gguf"
    path.write_bytes(whole)
    size = header_bytes(path)
    flips = data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 255)), min_size=1, max_size=4),
        label="flips",
    )
    damaged = bytearray(whole)
    for at, mask in flips:
        damaged[at] ^= mask
    path.write_bytes(damaged)
    refusals = []
    try:
        open_all(path)
    except ModelFileError as error:
        refusals.append(str(error))
    assert all(text.startswith(f"{path}: ") and "\n" not in text for text in refusals)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=400), version=st.sampled_from([2, 3]))
def test_noise_after_a_good_start_is_refused(tmp_path: Path, tail: bytes, version: int) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + tail)
    check_refused(path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not a GGUF file: 0 bytes"),
        (b"PK\x03\x04" + bytes(40), "wrong magic"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "version 0x3000000 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(40), "impossible count of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63) + bytes(40), "impossible count of metadata"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(40), "truncated within the header"),
    ],
)
def test_foreign_and_absurd_files_are_named_for_what_they_are(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    assert fault in check_refused(path)


def test_no_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    assert check_refused(tmp_path / "absent.gguf") == "no such file or directory"
    assert "directory" in check_refused(tmp_path)


def test_values_of_the_wrong_type_are_refused(tmp_path: Path) -> None:
    header = read_header(Tiny().write(tmp_path / "m.gguf"))
    for read in (header.integer, header.number, header.texts, header.numbers):
        with pytest.raises(ModelFileError, match=r"metadata general\.architecture is not"):
            read("general.architecture")
    with pytest.raises(ModelFileError, match=r"metadata llama\.block_count is not a string"):
        header.text("llama.block_count")
    with pytest.raises(ModelFileError, match=r"metadata lacks nothing\.here"):
        header.text("nothing.here")
