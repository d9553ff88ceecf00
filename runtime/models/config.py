"""What an architecture's hyper-parameters are, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind`: default, linear, llama3 or yarn; the other fields are those of its formula."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()  # GGUF: a divisor for each frequency, in place of llama3's formula

    @property
    def numbers(self) -> tuple[tuple[str, float], ...]:
        """What the formulas divide by or take the logarithm of."""
        named = [("rope theta", self.theta), ("rope factor", self.factor)]
        if self.kind == "llama3":
            named += [("low_freq_factor", self.low_freq_factor), ("high_freq_factor", self.high_freq_factor)]
        return (*named, *(("rope frequency factor", factor) for factor in self.frequency_factors))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tied: bool
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()  # one a layer: keys seen besides itself, -1 all; empty: all layers see all

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else -1

    def check(self) -> ModelConfig:
        """Raise ModelLoadError for sizes that cannot be a model; return self."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads", "head_dim")
        for name in (*sizes, "context_length"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"Model {self.name!r} has {name} {getattr(self, name)}; it must be positive.")
        if self.n_heads % self.n_kv_heads:
            raise ModelLoadError(
                f"Model {self.name!r} has {self.n_heads} heads over {self.n_kv_heads} KV heads, not a whole group each."
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"Model {self.name!r} has head size {self.head_dim}; rotary embedding needs it even.")
        for what, number in (("RMS norm epsilon", self.norm_eps), *self.rope.numbers):
            if not (math.isfinite(number) and number > 0):
                raise ModelLoadError(f"Model {self.name!r} has {what} {number}; it must be a number above 0.")
        if self.windows and len(self.windows) != self.n_layers:
            raise ModelLoadError(
                f"Model {self.name!r} gives the attention of {len(self.windows)} layers, but has {self.n_layers}."
            )
        return self


HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}


def config_from_hf(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a parsed config.json. Raises ModelLoadError for what is missing or unsupported."""
    architecture = _hf_architecture(raw, name)
    try:
        n_heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        n_layers = int(raw["num_hidden_layers"])
        context = int(raw["max_position_embeddings"])
        return ModelConfig(
            architecture=architecture,
            name=name,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=int(raw.get("num_key_value_heads") or n_heads),
            head_dim=int(raw.get("head_dim") or hidden // n_heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            context_length=context,
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope=_hf_rope(raw, context, name),
            qkv_bias=architecture == "qwen2" or bool(raw.get("attention_bias", False)),
            output_bias=architecture != "qwen2" and bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            windows=_hf_windows(raw, architecture, n_layers),
        ).check()
    except KeyError as missing:
        raise ModelLoadError(f"The config.json of model {name!r} lacks {missing.args[0]!r}.") from None
    except (TypeError, ValueError, ArithmeticError) as wrong:
        raise ModelLoadError(f"The config.json of model {name!r} has a value of the wrong kind: {wrong}.") from None


def _hf_architecture(raw: Mapping[str, Any], name: str) -> str:
    listed = raw.get("architectures")
    listed = listed if isinstance(listed, list) and listed else [listed]
    architecture = HF_ARCHITECTURES.get(str(listed[0]))
    if architecture is None:
        raise ModelLoadError(
            f"Model {name!r} has architecture {listed[0]!r}; supported: {', '.join(sorted(HF_ARCHITECTURES))}."
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(f"Model {name!r} stores its weights quantised with {method!r}, which is not supported.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"Model {name!r} uses activation {raw['hidden_act']!r}; only silu is supported.")
    return architecture


def _hf_rope(raw: Mapping[str, Any], context: int, name: str) -> RopeConfig:
    given = raw.get("rope_parameters") or {}
    scaling = {**(raw.get("rope_scaling") or {}), **given}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelLoadError(f"Model {name!r} uses rope type {kind!r}; supported are default, linear, llama3 and yarn.")
    if kind == "default":
        return RopeConfig(theta=theta)
    optional = {
        key: scaling[key]
        for key in (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
        if scaling.get(key) is not None
    }
    original = int(scaling.get("original_max_position_embeddings") or context)
    return RopeConfig(theta=theta, kind=kind, factor=float(scaling["factor"]), original_context=original, **optional)


def _hf_windows(raw: Mapping[str, Any], architecture: str, n_layers: int) -> tuple[int, ...]:
    """Keys seen besides itself, one a layer. A Hugging Face `sliding_window` counts the query's own key too."""
    size = raw.get("sliding_window")
    if not size or architecture == "llama":
        return ()
    if raw.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in raw["layer_types"]]
    elif architecture == "mistral":
        sliding = [True] * n_layers
    else:
        first = int(raw.get("max_window_layers", n_layers))
        sliding = [bool(raw.get("use_sliding_window")) and layer >= first for layer in range(n_layers)]
    return tuple(int(size) - 1 if slides else -1 for slides in sliding) if any(sliding) else ()


def config_from_gguf(
    fields: Mapping[str, Any], name: str, *, tied: bool, rope_factors: tuple[float, ...]
) -> ModelConfig:
    """ModelConfig of GGUF metadata (already plain values). Raises ModelLoadError."""
    arch = fields.get("general.architecture")
    architecture = GGUF_ARCHITECTURES.get(str(arch))
    if architecture is None:
        raise ModelLoadError(
            f"Model {name!r} is a GGUF of architecture {arch!r}; supported: {', '.join(sorted(GGUF_ARCHITECTURES))}."
        )
    get = lambda key, default=None: fields.get(f"{arch}.{key}", default)
    try:
        n_heads, hidden = int(fields[f"{arch}.attention.head_count"]), int(fields[f"{arch}.embedding_length"])
        n_layers, context = int(fields[f"{arch}.block_count"]), int(fields[f"{arch}.context_length"])
        window = get("attention.sliding_window")
        return ModelConfig(
            architecture=architecture,
            name=name,
            vocab_size=int(get("vocab_size") or len(fields["tokenizer.ggml.tokens"])),
            hidden_size=hidden,
            intermediate_size=int(fields[f"{arch}.feed_forward_length"]),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=int(get("attention.head_count_kv", n_heads)),
            head_dim=int(get("attention.key_length", hidden // n_heads)),
            norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-6)),
            context_length=context,
            tied=tied,
            rope=_gguf_rope(get, context, rope_factors, name),
            qkv_bias=architecture == "qwen2",
            windows=(int(window) - 1,) * n_layers if window else (),
        ).check()
    except KeyError as missing:
        raise ModelLoadError(f"The GGUF of model {name!r} lacks {missing.args[0]!r}.") from None
    except (TypeError, ValueError, ArithmeticError) as wrong:
        raise ModelLoadError(f"The GGUF of model {name!r} has a value of the wrong kind: {wrong}.") from None


def _gguf_rope(get: Any, context: int, factors: tuple[float, ...], name: str) -> RopeConfig:
    theta, kind = float(get("rope.freq_base", 10000.0)), str(get("rope.scaling.type", "none"))
    if factors:  # llama3's formula, already worked out by the converter
        return RopeConfig(theta=theta, frequency_factors=factors)
    if kind in ("none", ""):
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"Model {name!r} uses rope scaling {kind!r}; supported in GGUF are linear and yarn.")
    original = int(get("rope.scaling.original_context_length") or context)
    return RopeConfig(theta=theta, kind=kind, factor=float(get("rope.scaling.factor", 1.0)), original_context=original)
