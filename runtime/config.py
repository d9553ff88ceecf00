"""The options of engine and server: one source of truth for the flags, environment variables and YAML keys."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any

from runtime.errors import InvalidRequest
from runtime.floors import parse_floors

DEFAULT_MODEL = "smollm2-135m"


def _opt(default: object, text: str, *, flag: str | None = None, group: str = "model", choices: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    """A documented option. `flag` overrides the name derived from the field."""
    return field(default=default, metadata={"help": text, "flag": flag, "group": group, "choices": choices})


def _check_declared(config: Any) -> None:
    """Raise InvalidRequest for a value of the wrong type, not finite, or not among its field's choices."""
    hints = typing.get_type_hints(type(config))
    for one in fields(config):
        name, value = one.name, getattr(config, one.name)
        hint = hints[name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InvalidRequest(f"{name} must be of type {wanted}; got {value!r:.80}.", param=name)
        choices = one.metadata.get("choices")
        if choices and value not in choices:
            raise InvalidRequest(f"{name} must be one of {', '.join(choices)}; got {value!r:.80}.", param=name)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the scheduler and the runner are started with."""

    model: str = _opt(DEFAULT_MODEL, "name of an embedded model, a Hugging Face folder, a GGUF file or a hub id")
    served_model_name: str | None = _opt(None, "name shown to clients (default: the model's)")
    dtype: str = _opt("auto", "type of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = _opt("auto", "weight quantisation", choices=("auto", "none", "int8", "q4", "fp8"))
    load_format: str = _opt(
        "auto", "how weights are found; dummy: random", choices=("auto", "safetensors", "gguf", "dummy")
    )
    device: str = _opt("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    backend: str = _opt(
        "auto", "kernels", flag="--attention-backend", choices=("auto", "reference", "native", "flashinfer")
    )
    context_length: int | None = _opt(None, "longest prompt + answer, in tokens (default: the model's)")
    threads: int | None = _opt(None, "CPU threads of the kernels (default: physical cores)")
    seed: int = _opt(0, "seed of requests that bring none")
    batch_invariant: bool = _opt(True, "with a GPU: fixed KV splits, so attention does not depend on the batch")
    numa_bind: bool = _opt(False, "with a GPU: keep to the CPUs of the socket it hangs on")
    prefill_kernels: str = _opt("fa2", "with a GPU: FlashInfer's prefill; fa3 on Hopper", choices=("fa2", "fa3"))
    cuda_graphs: str = _opt(
        "start",
        "with a GPU: capture decode steps at start, when first needed, or never",
        choices=("start", "lazy", "off"),
    )

    page_size: int = _opt(16, "tokens in a KV page", group="cache")
    kv_pool_tokens: int | None = _opt(
        None, "KV pool size in tokens (default: from free memory)", flag="--max-total-tokens", group="cache"
    )
    mem_fraction: float | None = _opt(
        None,
        "share of free memory the KV pool may take (default: 0.5 on a CPU, 0.9 on a GPU)",
        flag="--mem-fraction-static",
        group="cache",
    )
    kv_dtype: str = _opt(
        "auto",
        "type of cached KV",
        flag="--kv-cache-dtype",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
        group="cache",
    )
    prefix_cache: bool = _opt(True, "reuse shared prefixes (off only to compare)", flag="--radix-cache", group="cache")
    eviction_policy: str = _opt(
        "lru", "which unpinned KV goes first", choices=("lru", "lfu", "slru", "priority", "hints"), group="cache"
    )
    cache_floors: str | None = _opt(
        None,
        'tokens that a cache salt keeps cached while others have some to give; JSON as {"team-a": 65536}',
        group="cache",
    )

    schedule_policy: str = _opt(
        "lpm",
        "order of waiting requests",
        choices=("fcfs", "lpm", "dfs-weight", "priority", "program", "fair"),
        group="scheduler",
    )
    overlap: bool = _opt(True, "plan step N+1 while step N runs", group="scheduler")
    max_running: int = _opt(256, "requests in a batch", flag="--max-running-requests", group="scheduler")
    max_queue: int = _opt(4096, "requests that may wait; more get 429", flag="--max-queued-requests", group="scheduler")
    max_queue_time_s: float | None = _opt(
        None, "seconds a request may wait to start; then it gets 503 (default: no limit)", group="scheduler"
    )
    max_step_tokens: int | None = _opt(
        None,
        "tokens of one step (default: 128 on a CPU, 1024 on a GPU)",
        flag="--max-step-tokens",
        group="scheduler",
    )
    chunk_tokens: int = _opt(
        512, "tokens of one request's prefill in one step", flag="--chunked-prefill-size", group="scheduler"
    )
    max_itl_inflation: float = _opt(1.5, "how much a prefill may stretch a step of running streams", group="scheduler")
    stall_s: float = _opt(
        60.0, "seconds without progress before health turns 503", flag="--watchdog-timeout", group="scheduler"
    )
    trace_steps: str | None = _opt(None, "write a Chrome trace of every step to this file", group="scheduler")
    audit: bool = _opt(False, "check every page's owner after every step (slow)", group="scheduler")

    grammar_backend: str = _opt(
        "auto", "structured output", choices=("auto", "xgrammar", "llguidance"), group="grammar"
    )
    jump_forward: bool = _opt(True, "append tokens the grammar forces without decoding them", group="grammar")

    kv_events_config: str | None = _opt(
        None, 'publish KV events; JSON as {"publisher":"zmq","endpoint":"tcp://*:5557"}', group="doors"
    )

    def __post_init__(self) -> None:
        _check_declared(self)
        for name, low in (
            ("page_size", 1),
            ("context_length", 1),
            ("kv_pool_tokens", 1),
            ("threads", 1),
            ("max_running", 1),
            ("max_queue", 0),
            ("max_step_tokens", 1),
            ("chunk_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise InvalidRequest(f"{name} must be at least {low}; got {value}.", param=name)
        if self.mem_fraction is not None and not 0.0 < self.mem_fraction < 1.0:
            raise InvalidRequest(
                f"mem_fraction must be between 0 and 1; got {self.mem_fraction}.", param="mem_fraction"
            )
        if self.max_itl_inflation < 1.0:
            raise InvalidRequest("max_itl_inflation must be at least 1.", param="max_itl_inflation")
        for name in ("max_queue_time_s", "stall_s"):
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise InvalidRequest(f"{name} must be above 0; got {seconds}.", param=name)
        parse_floors(self.cache_floors)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `ramet serve` opens to the network, beside the engine's own options."""

    host: str = _opt("127.0.0.1", "address to listen on (0.0.0.0: every interface)", group="server")
    port: int = _opt(30000, "port to listen on (0: any free one)", group="server")
    api_key: str | None = _opt(
        None, "key that clients must send; several, comma separated, do not share cached prefixes", group="server"
    )
    cors_origins: str = _opt("*", "origins a browser may call from, comma separated", group="server")
    root_path: str = _opt("", "path prefix a proxy in front has taken off", group="server")
    max_body_bytes: int = _opt(64 * 2**20, "largest request body", group="server")
    max_batch: int = _opt(1024, "most prompts x n in one HTTP request", flag="--max-batch-items", group="server")
    response_store: int = _opt(1024, "responses kept for previous_response_id", group="server")
    drain_timeout_s: float = _opt(
        30.0, "seconds running streams get after SIGTERM or Ctrl-C", flag="--drain-timeout", group="server"
    )

    chat_template: str | None = _opt(None, "file with a Jinja chat template (default: the model's)", group="text")
    tool_call_parser: str = _opt("auto", "how tool calls are read from text (auto: by the template)", group="text")
    reasoning_parser: str = _opt("auto", "how thoughts are told from answers (auto: by the template)", group="text")

    zmq_endpoint: str | None = _opt(None, "also speak ZMQ here, as tcp://127.0.0.1:30001 (default: off)", group="doors")

    metrics: bool = _opt(True, "serve Prometheus metrics at /metrics", flag="--enable-metrics", group="logging")
    log_level: str = _opt("info", "least level logged", choices=("debug", "info", "warning", "error"), group="logging")
    log_format: str = _opt("text", "text for people, json for collectors", choices=("text", "json"), group="logging")
    access_log: bool = _opt(True, "one line a request, with its timing", group="logging")

    def __post_init__(self) -> None:
        _check_declared(self)
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port must be from 0 to 65535; got {self.port}.", param="port")
        for name, low in (("max_body_bytes", 1024), ("max_batch", 1), ("response_store", 0), ("drain_timeout_s", 0)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be at least {low}; got {getattr(self, name)}.", param=name)
