"""Flags, environment variables and YAML keys, all derived from the config dataclasses.

A value is taken from the first of: flag, environment variable, the file of --config, the default. The environment and
the file know an option by its field's name and by each of its flags (RAMET_DRAIN_TIMEOUT, RAMET_DRAIN_TIMEOUT_S).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime.config import EngineConfig, ServerConfig
from runtime.errors import InvalidRequest

Config = TypeVar("Config", EngineConfig, ServerConfig)

GROUPS = {  # group -> its heading in --help, in this order
    "model": "Model",
    "server": "Server",
    "text": "Chat text",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "grammar": "Structured output",
    "doors": "Other doors",
    "logging": "Logging and metrics",
}

# Other spellings of an option, as launch lines on the web have them (SGLang's first, then vLLM's).
ALIASES = {
    "model": ("--model-path",),
    "kv_pool_tokens": ("--kv-pool-tokens",),
    "mem_fraction": ("--gpu-memory-utilization",),
    "context_length": ("--max-model-len", "--max-context-length"),
    "page_size": ("--block-size",),
    "max_running": ("--max-num-seqs", "--max-running"),
    "max_queue": ("--max-queue",),
    "max_step_tokens": ("--max-num-batched-tokens", "--max-prefill-tokens"),
    "backend": ("--backend",),
    "eviction_policy": ("--radix-eviction-policy",),
    "seed": ("--random-seed",),
    "cors_origins": ("--allowed-origins",),
}

FILES = ("chat_template", "trace_steps")  # options that name a file

# Switches that set an option to a fixed value.
SWITCHES = {
    "--disable-radix-cache": ("prefix_cache", False),
    "--enable-prefix-caching": ("prefix_cache", True),
    "--no-enable-prefix-caching": ("prefix_cache", False),
    "--disable-overlap-schedule": ("overlap", False),
    "--disable-jump-forward": ("jump_forward", False),
}

# What Ramet always does, so that asking for it is harmless; said once at start.
ALWAYS = {
    "--enable-cache-report": "cached tokens are always reported",
    "--skip-server-warmup": "no warm-up requests are made",
    "--trust-remote-code": "code from model folders is never run",
    "--enable-deterministic-inference": "answers never depend on the batch or the cache",
    "--disable-cuda-graph": "it changes speed only",
    "--enable-auto-tool-choice": "tools are always offered",
}

# Options of other servers whose meaning is not here: the value that changes nothing is taken, any other refused.
UNSUPPORTED = {
    "--tp": ("1", "tensor parallelism"),
    "--tp-size": ("1", "tensor parallelism"),
    "--tensor-parallel-size": ("1", "tensor parallelism"),
    "--dp": ("1", "data parallelism"),
    "--dp-size": ("1", "data parallelism"),
    "--data-parallel-size": ("1", "data parallelism"),
    "--pp-size": ("1", "pipeline parallelism"),
    "--pipeline-parallel-size": ("1", "pipeline parallelism"),
    "--ep-size": ("1", "expert parallelism"),
    "--nnodes": ("1", "serving from several hosts"),
    "--speculative-algorithm": ("none", "speculative decoding"),
    "--speculative-draft-model-path": ("", "speculative decoding"),
    "--lora-paths": ("", "LoRA adapters"),
    "--tokenizer-path": ("", "a tokenizer from another place than the model's"),
    "--tokenizer-mode": ("auto", "a choice of tokenizer"),
    "--mm-attention-backend": ("", "images and sound"),
    "--hicache-ratio": ("", "offloading the KV cache to host memory"),
    "--cpu-offload-gb": ("0", "offloading weights to host memory"),
    "--ssl-keyfile": ("", "TLS (put a proxy in front)"),
    "--ssl-certfile": ("", "TLS (put a proxy in front)"),
    "--stream-interval": ("1", "coalescing of streamed tokens"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One configurable value, as its dataclass field declares it."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    group: str
    flags: tuple[str, ...]
    choices: tuple[str, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its names outside the command line, with `_` for `-`; the first flag's comes first."""
        return tuple(dict.fromkeys((*(flag[2:].replace("-", "_") for flag in self.flags), self.name)))

    @property
    def env(self) -> tuple[str, ...]:
        return tuple(f"RAMET_{spelling.upper()}" for spelling in self.spellings)

    def parse(self, value: Any, source: str) -> Any:
        """`value` (text, or YAML's own type) as this option's type. Raises InvalidRequest naming the source."""
        if value is None or (self.optional and isinstance(value, str) and value.lower() in ("none", "null", "")):
            if not self.optional:
                raise InvalidRequest(f"{source} needs a value.", param=self.name)
            return None
        parsed = _as_bool(value) if self.kind is bool else _as(self.kind, value)
        if parsed is None:
            raise InvalidRequest(f"{source} must be {_name_of(self.kind)}; got {value!r}.", param=self.name)
        if self.choices and parsed not in self.choices:
            near = difflib.get_close_matches(str(parsed), self.choices, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise InvalidRequest(
                f"{source} must be one of {', '.join(self.choices)}; got {parsed!r}.{hint}", param=self.name
            )
        return parsed


def options_of(config: type) -> list[Option]:
    """The options a config dataclass declares."""
    hints = typing.get_type_hints(config)
    return [_option(field, hints[field.name]) for field in dataclasses.fields(config)]


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not type(None)]
    own = field.metadata.get("flag") or "--" + field.name.replace("_", "-")
    return Option(
        name=field.name,
        kind=kinds[0],
        optional=len(kinds) < len(members),
        default=field.default,
        help=field.metadata.get("help", ""),
        group=field.metadata.get("group", "model"),
        flags=(own, *ALIASES.get(field.name, ())),
        choices=tuple(field.metadata.get("choices", ())),
    )


# -- flags -------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, configs: Iterable[type]) -> None:
    """Give `parser` a flag for every option, under headings for people, and the flags of other servers."""
    options = [option for config in configs for option in options_of(config)]
    names = {option.name for option in options}
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options (a flag wins over it)")
    for key, title in GROUPS.items():
        members = [option for option in options if option.group == key]
        if members:
            group = parser.add_argument_group(title)
            for option in members:
                _add_flag(group, option)
    for flag, (name, value) in SWITCHES.items():
        if name in names:
            parser.add_argument(
                flag, dest=name, action="store_const", const=value, default=None, help=argparse.SUPPRESS
            )
    for flag in ALWAYS:
        parser.add_argument(flag, action="append_const", dest="always", const=flag, help=argparse.SUPPRESS)
    for flag in UNSUPPORTED:
        parser.add_argument(flag, action=_Unsupported, nargs="?", const="", help=argparse.SUPPRESS)


def _add_flag(group: Any, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.choices:
        text += f" [{' | '.join(option.choices)}]"
    if option.default not in (None, "") and option.kind is not bool:
        text += f" (default {option.default})"
    if option.kind is bool:
        text += f" (default {'on' if option.default else 'off'})"
        group.add_argument(*option.flags, dest=option.name, action=_OnOff, nargs="?", metavar="on|off", help=text)
        off = ["--no-" + flag[2:] for flag in option.flags]
        group.add_argument(
            *off, dest=option.name, action="store_const", const=False, default=None, help=argparse.SUPPRESS
        )
        return
    group.add_argument(*option.flags, dest=option.name, metavar=_metavar(option), default=None, help=text)


class _OnOff(argparse.Action):
    """`--x`, `--x on`, `--x false`."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        value = True if values is None else _as_bool(values)
        if value is None:
            parser.error(f"argument {option_string}: must be on or off; got {values!r}")
        setattr(namespace, self.dest, value)


class _Unsupported(argparse.Action):
    """A flag that Ramet knows of and does not support; its neutral value passes."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        neutral, what = UNSUPPORTED[option_string or ""]
        if str(values or "").lower() != neutral:
            parser.error(f"argument {option_string}: Ramet does not support {what} yet; leave this option out")


def _metavar(option: Option) -> str:
    if option.name in FILES:
        return "FILE"
    return {int: "N", float: "X"}.get(option.kind, option.name.rsplit("_", 1)[-1].upper())


# -- values ------------------------------------------------------------------------------------------------------


def read_yaml(path: str | None) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InvalidRequest."""
    if path is None:
        return {}
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as err:
        raise InvalidRequest(f"--config {path}: {err.strerror}.", param="config") from err
    except yaml.YAMLError as err:
        raise InvalidRequest(f"--config {path} is not YAML: {' '.join(str(err).split())}", param="config") from err
    if not isinstance(data or {}, dict):
        raise InvalidRequest(f"--config {path} must hold a mapping of option names to values.", param="config")
    return data or {}


def known_yaml_keys(configs: Iterable[type]) -> dict[str, str]:
    """Every spelling a YAML file may use, with `_` for `-`, and the option it means."""
    keys: dict[str, str] = {}
    for config in configs:
        for option in options_of(config):
            keys.update(dict.fromkeys(option.spellings, option.name))
    return keys


def check_yaml(data: Mapping[str, Any], configs: Sequence[type]) -> dict[str, Any]:
    """YAML keys turned into option names. Raises InvalidRequest for an unknown key, suggesting the nearest."""
    known = known_yaml_keys(configs)
    named: dict[str, Any] = {}
    for key, value in data.items():
        name = known.get(str(key).lstrip("-").replace("-", "_"))
        if name is None:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise InvalidRequest(f"The configuration file has an unknown option {str(key)!r}.{hint}", param=str(key))
        named[name] = value
    return named


def resolve(config: type[Config], flags: Mapping[str, Any], yaml: Mapping[str, Any]) -> Config:
    """Build `config` from flags, environment and YAML, in this order of precedence. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    for option in options_of(config):
        given = flags.get(option.name)
        if given is not None:
            values[option.name] = option.parse(given, option.flags[0])
        elif env := next((env for env in option.env if env in os.environ), None):
            values[option.name] = option.parse(os.environ[env], env)
        elif option.name in yaml:
            values[option.name] = option.parse(yaml[option.name], f"{option.name} in the configuration file")
    return config(**values)


def _as_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    return False if text in ("0", "false", "no", "off") else None


def _as(kind: type, value: Any) -> Any:
    """`value` as `kind`, None if it is not one."""
    if isinstance(value, bool):
        return None
    if kind is str:
        return value if isinstance(value, str) else str(value)
    if isinstance(value, float) and kind is int and not value.is_integer():
        return None
    try:
        parsed = kind(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def _name_of(kind: type) -> str:
    return {bool: "on or off", int: "a whole number", float: "a number", str: "text"}[kind]
