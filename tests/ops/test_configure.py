"""Settings merge in order, remember their source, and refuse what they do not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.limits import Limits
from baton.ops.configure import ConfigurationError, configure, known_settings
from baton.workers.config import Settings, size_bytes, swap_bytes


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def refused(flags: dict[str, str] | None = None, environment: dict[str, str] | None = None, file: str = "") -> str:
    with pytest.raises(ConfigurationError) as caught:
        configure(flags or {}, environment or {}, file or None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_with_nothing_given_the_defaults_are_in_force() -> None:
    configured = configure({}, {})
    assert configured.settings == Settings()
    assert set(configured.sources.values()) == {"default"}
    assert configured.values()["limits.drain_s_max"] == Limits().drain_s_max


def test_later_sources_win_and_each_value_remembers_its_source(tmp_path: Path) -> None:
    file = write(tmp_path / "b.toml", 'port = 1\nhost = "::"\nthreads = 3\n[limits]\ndrain_s_max = 5\n')
    environment = {"BATON_PORT": "2", "BATON_THREADS": "4", "BATON_LIMITS__RESTARTS_MAX": "9"}
    configured = configure({"port": "3"}, environment, file)
    settings, sources = configured.settings, configured.sources
    assert (settings.port, settings.threads, settings.host) == (3, 4, "::")
    assert (settings.limits.drain_s_max, settings.limits.restarts_max) == (5.0, 9)
    assert sources["port"] == "--port"
    assert sources["threads"] == "BATON_THREADS"
    assert sources["host"] == sources["limits.drain_s_max"] == file
    assert sources["limits.restarts_max"] == "BATON_LIMITS__RESTARTS_MAX"
    assert sources["model"] == "default"


def test_the_file_may_be_named_by_the_environment_and_the_flag_wins(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.toml", "port = 1"), write(tmp_path / "2.toml", "port = 2")
    assert configure({}, {"BATON_CONFIG": one}).settings.port == 1
    assert configure({}, {"BATON_CONFIG": one}, two).settings.port == 2


@pytest.mark.parametrize("name", list(known_settings()))
def test_every_setting_can_be_set_from_the_environment(name: str) -> None:
    texts = {
        "dtype": "float32",
        "device": "cuda",
        "weights": "float32",
        "kernels": "torch",
        "worker": "scripted",
        "log_level": "debug",
        "kv_memory": "1GiB",
        "admission": "reserve",
        "order": "shortest",
    }
    text = texts.get(name, "1")
    variable = "BATON_" + name.replace(".", "__").upper()
    configured = configure({}, {variable: text})
    assert configured.sources[name] == variable
    assert str(configured.values()[name]) in (text, "1.0", "True", "('1',)")


def test_a_list_is_separated_by_commas_outside_a_file(tmp_path: Path) -> None:
    expected = ("http://a", "http://b")
    assert configure({}, {"BATON_ORIGINS": "http://a, http://b"}).settings.origins == expected
    file = write(tmp_path / "b.toml", 'origins = ["http://a", "http://b"]')
    assert configure({}, {}, file).settings.origins == expected
    assert "must be a list of texts" in refused(file=write(tmp_path / "t.toml", 'origins = "http://a"'))


def test_unknown_keys_are_errors_that_name_the_source_and_suggest(tmp_path: Path) -> None:
    file = write(tmp_path / "b.toml", "prot = 1")
    assert refused(file=file) == f"{file}: unknown setting 'prot'; did you mean 'port'?"
    nested = write(tmp_path / "n.toml", "[limits]\ndrain_max = 1")
    assert "unknown setting 'limits.drain_max'; did you mean 'limits.drain_s_max'?" in refused(file=nested)
    message = refused(environment={"BATON_THREDS": "2"})
    assert message == "unknown setting BATON_THREDS in the environment; did you mean 'BATON_THREADS'?"
    assert "did you mean" not in refused(environment={"BATON_ZZZZZZ": "2"})


def test_variables_of_others_are_left_alone() -> None:
    assert configure({}, {"BATON_ADDRESS": "tcp://h:1", "HOME": "/", "BATONS": "2"}).settings == Settings()


def test_kubernetes_service_links_are_explained() -> None:
    assert "enableServiceLinks" in refused(environment={"BATON_PORT": "tcp://10.0.0.7:8000"})
    assert "enableServiceLinks" in refused(environment={"BATON_SERVICE_HOST": "10.0.0.7"})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("port", "http", "port must be an integer from 0 to 65535, got 'http'"),
        ("port", "65536", "got '65536'"),
        ("threads", "0", "threads must be an integer from 1 to 256, got '0'"),
        ("threads", "100000", "got '100000'"),
        ("dtype", "int4", "dtype must be one of bfloat16, float32, got 'int4'"),
        ("kv_memory", "plenty", "kv_memory must be a size like 4GiB, got 'plenty'"),
        ("swap_memory", "0GiB", "swap_memory must be a size like 4GiB, got '0GiB'"),
        ("trace_sample_ratio", "nan", "trace_sample_ratio must be a number from 0 to 1, got 'nan'"),
        ("scripted_step_ms", "inf", "got 'inf'"),
        ("prefix_cache", "maybe", "prefix_cache must be true or false, got 'maybe'"),
        ("admission", "hope", "admission must be one of optimistic, predicted, reserve, got 'hope'"),
        ("order", "mine", "order must be one of arrival, deadline, prefix, priority, shortest, got 'mine'"),
        ("itl_target_ms", "-1", "itl_target_ms must be a number of at least 0, got '-1'"),
        ("limits.drain_s_max", "0", "limits.drain_s_max must be a positive number, got '0'"),
        ("limits.drain_s_max", "inf", "got 'inf'"),
        ("limits.restarts_max", "2.5", "limits.restarts_max must be an integer, got '2.5'"),
    ],
)
def test_wrong_values_name_source_setting_and_value(name: str, text: str, words: str) -> None:
    variable = "BATON_" + name.replace(".", "__").upper()
    message = refused(environment={variable: text})
    assert message.startswith(f"{variable}: ")
    assert words in message


def test_a_file_is_typed_so_a_text_is_not_a_number(tmp_path: Path) -> None:
    file = write(tmp_path / "b.toml", 'port = "8000"')
    assert refused(file=file) == f"{file}: port must be an integer from 0 to 65535, got '8000'"
    assert "limits must be a table" in refused(file=write(tmp_path / "l.toml", "limits = 3"))
    assert "not TOML" in refused(file=write(tmp_path / "t.toml", "port ="))
    assert "cannot be read" in refused(file=str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"weights": "int8", "dtype": "float32"}, "--weights, --dtype: weights int8 and dtype float32"),
        ({"weights": "native", "kernels": "torch"}, "--weights, --kernels: weights native and kernels torch"),
        ({"weights": "int8", "device": "cuda"}, "--weights, --device: weights int8 and device cuda"),
        ({"kernels": "native", "weights": "float32"}, "--kernels, --weights: kernels native and weights float32"),
    ],
)
def test_settings_that_no_kernels_can_satisfy_are_refused_before_any_process_starts(
    flags: dict[str, str], words: str
) -> None:
    assert refused(flags=flags) == f"{words} exclude each other"
    assert configure(flags | {"worker": "scripted"}, {}).settings.worker == "scripted"


def test_two_ways_to_size_the_cache_exclude_each_other_within_one_source(tmp_path: Path) -> None:
    both = {"kv_memory": "1GiB", "kv_blocks": "7"}
    assert refused(flags=both) == "--kv-memory, --kv-blocks: kv_memory and kv_blocks exclude each other"
    file = write(tmp_path / "b.toml", 'kv_memory = "1GiB"')
    configured = configure({"kv_blocks": "7"}, {}, file)
    assert (configured.settings.kv_memory, configured.settings.kv_blocks) == (None, 7)
    assert configured.sources["kv_memory"] == "default"


def test_swap_memory_may_be_none_or_a_size() -> None:
    assert [swap_bytes(Settings(swap_memory=text)) for text in ("0", " 0 ", "2KiB")] == [0, 0, 2048]
    assert swap_bytes(Settings()) == 0
    assert configure({"swap_memory": "0"}, {}).settings.swap_memory == "0"


def test_sizes() -> None:
    assert [size_bytes(text) for text in ("7", "1 KiB", "1.5kb", "4GiB")] == [7, 1024, 1500, 4 << 30]
    for text in ("", "-1", "0", "3 apples", "1.2.3"):
        with pytest.raises(ValueError):
            size_bytes(text)
