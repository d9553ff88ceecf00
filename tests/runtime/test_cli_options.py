"""Options come from flags, environment and YAML, in this order, and all derive from the config classes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from runtime.cli import build_parser, configs_of, run
from runtime.config import EngineConfig, ServerConfig
from runtime.errors import InvalidRequest
from runtime.options import GROUPS, UNSUPPORTED, check_yaml, options_of, read_yaml, resolve


def parse(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    return configs_of(build_parser().parse_args(["serve", *argv]))


def test_nothing_said_gives_the_defaults() -> None:
    assert parse() == (EngineConfig(), ServerConfig())


def test_short_names_of_the_limits_work() -> None:
    engine, _ = parse("--max-running", "8", "--max-queue", "9")
    assert (engine.max_running, engine.max_queue) == (8, 9)


def test_a_launch_line_from_the_web_works() -> None:
    engine, server = parse(
        *("--model-path", "m", "--host", "0.0.0.0", "--port", "8000", "--tp", "1", "--schedule-policy", "fcfs"),
        *("--page-size", "1", "--mem-fraction-static", "0.8", "--context-length", "4096", "--kv-cache-dtype", "auto"),
        *("--chunked-prefill-size", "256", "--max-running-requests", "8", "--served-model-name", "x"),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "auto", "--enable-metrics", "--trust-remote-code"),
        *("--disable-radix-cache", "--disable-overlap-schedule", "--attention-backend", "native"),
    )
    assert (engine.model, engine.page_size, engine.mem_fraction, engine.context_length) == ("m", 1, 0.8, 4096)
    assert (engine.chunk_tokens, engine.max_running, engine.served_model_name) == (256, 8, "x")
    assert (engine.prefix_cache, engine.overlap, engine.backend) == (False, False, "native")
    assert (server.host, server.port, server.tool_call_parser, server.metrics) == ("0.0.0.0", 8000, "hermes", True)


@pytest.mark.parametrize("flag", ["--max-model-len", "--context-length"])
def test_aliases_mean_the_same(flag: str) -> None:
    assert parse(flag, "512")[0].context_length == 512


@pytest.mark.parametrize(
    ("argv", "value"),
    [(["--overlap"], True), (["--no-overlap"], False), (["--overlap", "off"], False), (["--overlap", "true"], True)],
)
def test_switches_are_said_in_many_ways(argv: list[str], value: bool) -> None:
    assert parse(*argv)[0].overlap is value


def test_flag_wins_over_environment_wins_over_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ramet.yaml"
    file.write_text("page-size: 4\nmax_running: 5\nport: 1234\nmodel-path: from-file\n")
    monkeypatch.setenv("RAMET_MAX_RUNNING", "6")
    monkeypatch.setenv("RAMET_PORT", "4321")
    engine, server = parse("--config", str(file), "--port", "1")
    assert (engine.page_size, engine.max_running, engine.model) == (4, 6, "from-file")
    assert server.port == 1


@pytest.mark.parametrize("name", ["RAMET_DRAIN_TIMEOUT", "RAMET_DRAIN_TIMEOUT_S"])
def test_the_environment_knows_an_option_by_its_flag_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    assert parse()[1].drain_timeout_s == 7


def test_every_option_has_a_flag_an_environment_name_a_yaml_key_and_help() -> None:
    for config in (EngineConfig, ServerConfig):
        for option in options_of(config):
            assert option.help
            assert option.group in GROUPS
            assert {f"RAMET_{name.upper()}" for name in (option.name, option.flags[0][2:].replace("-", "_"))} <= {
                *option.env
            }
            assert check_yaml({option.flags[0][2:]: 1}, (config,)) == {option.name: 1}


def test_every_config_field_survives_the_round_trip_by_flags() -> None:
    """A field added to a config is at once a flag of its own type."""
    engine = EngineConfig(model="a", context_length=64, mem_fraction=0.25, overlap=False, kv_pool_tokens=128)
    argv = []
    for option in options_of(EngineConfig):
        value = getattr(engine, option.name)
        if value is not None:
            argv += [option.flags[0], str(value)]
    assert parse(*argv)[0] == engine


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"page_size": "x"}, "must be a whole number"),
        ({"page_size": 1.5}, "must be a whole number"),
        ({"page_size": 0}, "at least 1"),
        ({"mem_fraction": "nan"}, "must be a number"),
        ({"overlap": "perhaps"}, "must be on or off"),
        ({"dtype": "float3"}, "Did you mean float32?"),
        ({"model": None}, "needs a value"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence.replace("?", r"\?")) as caught:
        resolve(EngineConfig, {}, values)
    assert caught.value.param == next(iter(values))


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMET_PORT", "http")
    with pytest.raises(InvalidRequest, match="RAMET_PORT must be a whole number"):
        parse()


def test_an_unknown_yaml_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"'page_sise'\. Did you mean page_size"):
        check_yaml({"page_sise": 16}, (EngineConfig,))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_a_yaml_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"bad\.yaml"):
        read_yaml(str(file))


def test_a_missing_yaml_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        read_yaml(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("flag", sorted(UNSUPPORTED))
def test_what_is_not_supported_says_so(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flag, "something")
    assert caught.value.code == 2
    assert f"{flag}: Ramet does not support" in capsys.readouterr().err


def test_an_unknown_flag_ends_with_2_and_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--page-sise", "4")
    assert caught.value.code == 2
    assert "ramet serve: error: --page-sise 4: not understood; did you mean --page-size?" in capsys.readouterr().err


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "serve a model over HTTP" in capsys.readouterr().err


def test_help_is_grouped_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options", *GROUPS.values()]
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"].split()[0] in text


def test_an_option_of_the_wrong_kind_exits_2_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--page-size", "many"]) == 2
    assert capsys.readouterr().err == "ramet: --page-size must be a whole number; got 'many'.\n"


def test_flags_of_a_parsed_namespace_start_unset() -> None:
    """Unset flags are None, so that the environment and the file can speak."""
    args: argparse.Namespace = build_parser().parse_args(["serve"])
    named = {option.name for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    assert all(getattr(args, name) is None for name in named)


def test_an_open_zmq_door_without_a_key_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--model", "none", "--port", "0", "--zmq-endpoint", "tcp://0.0.0.0:1"]) == 2
    assert (
        capsys.readouterr().err == "ramet: zmq_endpoint tcp://0.0.0.0:1 is open to the network; that needs --api-key.\n"
    )
