"""Hyper-parameters that cannot be a model's are refused at load, in one sentence."""

from __future__ import annotations

import math

import pytest

from runtime.errors import InvalidRequest, ModelLoadError
from runtime.models.config import config_from_hf
from tests.lang.engines import toy_engine

GOOD = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}


def scaled(kind: str, **values: float) -> dict:
    return {"rope_scaling": {"rope_type": kind, "factor": 2.0, **values}}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rope_theta": 0}, "rope theta"),
        ({"rope_theta": math.inf}, "rope theta"),
        ({"rms_norm_eps": math.nan}, "epsilon"),
        ({"rms_norm_eps": 0}, "epsilon"),
        (scaled("linear", factor=0), "rope factor"),
        (scaled("yarn", factor=-1.0), "rope factor"),
        (scaled("llama3", low_freq_factor=0.0), "low_freq_factor"),
        ({"layer_types": ["sliding_attention"]}, "1 layers"),
        ({"num_hidden_layers": 0}, "n_layers"),
    ],
)
def test_what_would_divide_by_zero_or_index_nothing(change, what):
    config_from_hf(GOOD, "m")
    with pytest.raises(ModelLoadError, match=what):
        config_from_hf({**GOOD, **change}, "m")


def test_the_engines_own_door_names_what_is_of_the_wrong_type():
    import ramet as rt

    with pytest.raises(InvalidRequest, match="EngineConfig"):
        rt.Engine(config=5)  # type: ignore[arg-type]
    with toy_engine() as engine:
        for call, param in (
            (lambda: engine.abort([]), "rid"),  # type: ignore[arg-type]
            (lambda: engine.generate("x", ignore_eos="yes"), "ignore_eos"),
            (lambda: engine.generate("x", top_logprobs=2), "top_logprobs"),
            (lambda: engine.generate("x", tools=5), "tools"),
            (lambda: engine.generate("x", tools=[{}]), "tools"),
            (lambda: engine.chat([{"role": "user", "content": "x"}], tools=5), "tools"),
            (lambda: engine.chat([{"role": "user", "content": "x"}], chat_template_kwargs=5), "chat_template_kwargs"),
            (lambda: engine.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"tools": 1}), None),
        ):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.param == param or param is None
        assert engine.generate("x", max_tokens=2).token_ids
