"""Which class runs an architecture, and which tensors it reads."""

from __future__ import annotations

from collections.abc import Callable

from runtime.models.config import ModelConfig
from runtime.models.decoder import Model
from runtime.models.layers import Builder
from runtime.models.llama import Llama
from runtime.models.qwen2 import Qwen2
from runtime.models.qwen3 import Qwen3

_CLASSES: dict[str, Callable[[Builder, int], Model]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def build_model(build: Builder, context_length: int) -> Model:
    """The model of `build.config`, with room for positions below `context_length`."""
    return _CLASSES[build.config.architecture](build, context_length)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model."""
    hidden, wide, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (config.n_heads * d, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.n_kv_heads * d, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.n_kv_heads * d, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.n_heads * d, config.output_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}"
        for name, (n_out, n_in, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (n_out, n_in)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (n_out,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        if config.architecture == "qwen3":
            for norm in ("q_norm", "k_norm"):
                shapes[f"{prefix}.self_attn.{norm}.weight"] = (d,)
    return shapes
