"""Folders, shards, stop ids, dummy weights, memory: what loads, and what is refused with one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError, NotFound
from runtime.execute.memory import size_pool
from runtime.models.config import config_from_hf
from runtime.models.loader import load_runner, open_checkpoint, resolve_model
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny_models import save, tiny_model

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def engine(path: Path | str, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"backend": "reference", "kv_pool_tokens": 64, "threads": 1}
    return EngineConfig(model=str(path), **{**defaults, **options})


def first_token(config: EngineConfig) -> int:
    runner = load_runner(config)
    plan = make_plan([Row(Seq([5, 9, 60], [1]), 0, 3)], 16)
    token = int(runner.launch(plan).result(30).tokens[0])
    runner.close()
    return token


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save(model, tmp_path / "one")
    save(model, tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert first_token(engine(tmp_path / "one")) == first_token(engine(tmp_path / "many"))


def test_a_missing_or_truncated_shard_is_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=f"{shard.name} is truncated"):
        load_runner(engine(tmp_path))
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"lacks the shard {shard.name}"):
        load_runner(engine(tmp_path))


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks config\.json"):
        load_runner(engine(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ModelLoadError, match=r"lacks model\.safetensors"):
        load_runner(engine(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        load_runner(engine(tmp_path))


def test_weights_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 81}))
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.0\.mlp\.gate_proj\.weight' .* expected \(81, 48\)"):
        load_runner(engine(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    with pytest.raises(ModelLoadError, match=r"lack the tensor 'model\.layers\.3"):
        load_runner(engine(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM'; supported: LlamaForCausalLM"),
        ({"architectures": None}, "architecture None"),
        ({"hidden_size": None}, "value of the wrong kind"),
        ({"num_key_value_heads": 4}, "6 heads over 4 KV heads"),
        ({"head_dim": 7}, "head size 7"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    ],
    ids=str,
)
def test_an_unsupported_config_is_one_clear_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_from_hf({**BASE, **change}, "m")


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": {"a": 1}},
        {"architectures": [["x"]]},
        {"quantization_config": "gptq"},
        {"vocab_size": float("inf")},
        {"max_position_embeddings": 0},
    ],
)
def test_a_config_of_wrong_kinds_is_one_clear_sentence(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="'m'"):
        config_from_hf({**BASE, **change}, "m")


def test_an_unset_quantization_is_none() -> None:
    assert config_from_hf({**BASE, "quantization_config": None}, "m") == config_from_hf(BASE, "m")


def test_an_index_that_names_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 5}}))
    with pytest.raises(ModelLoadError, match="weight_map"):
        open_checkpoint(tmp_path)


def test_a_config_without_a_needed_value_names_it() -> None:
    with pytest.raises(ModelLoadError, match="lacks 'vocab_size'"):
        config_from_hf({k: v for k, v in BASE.items() if k != "vocab_size"}, "m")


def test_rope_is_read_from_either_generation_of_configs() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = config_from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}, "m").rope
    new = config_from_hf({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}, "m").rope
    assert old == new
    assert (old.theta, old.factor, old.original_context) == (5e5, 8.0, 64)


def test_a_window_counts_other_keys_only() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 10}
    assert config_from_hf(mistral, "m").windows == (9, 9)
    assert config_from_hf({**mistral, "sliding_window": None}, "m").windows == ()
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 10, "max_window_layers": 1}
    assert config_from_hf(qwen, "m").windows == ()
    assert config_from_hf({**qwen, "use_sliding_window": True}, "m").windows == (-1, 9)


def test_all_stop_ids_count(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": 3}))
    assert open_checkpoint(tmp_path).eos_ids == (1, 3, 7)


def test_the_embedded_model_ends_at_chat_end_and_text_end(smollm2: Path) -> None:
    assert open_checkpoint(smollm2).eos_ids == (0, 2)  # <|endoftext|>, <|im_end|>


def test_dummy_weights_need_only_a_config_and_are_the_same_every_time(tmp_path: Path) -> None:
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": [architecture]}))
        config = engine(tmp_path, load_format="dummy")
        assert first_token(config) == first_token(config)


def test_unknown_models_are_not_found(tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "nothing"), "./nothing/here", "long" * 2000):
        with pytest.raises(NotFound, match="There is no model"):
            resolve_model(name)


def test_a_load_format_that_does_not_fit_the_path_is_refused(tmp_path: Path, smollm2: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    with pytest.raises(ModelLoadError, match="is a folder"):
        load_runner(engine(tmp_path, load_format="gguf"))
    with pytest.raises(ModelLoadError, match="is a file"):
        load_runner(engine(smollm2, load_format="safetensors"))


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    with pytest.raises(InvalidRequest, match="from 1 to the model's 256; got 257"):
        load_runner(engine(tmp_path, context_length=257))


def test_cuda_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="sees no usable GPU"):
        load_runner(engine(tmp_path, device="cuda"))


def test_the_spec_says_why(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path)
    runner = load_runner(engine(tmp_path, kv_pool_tokens=100))
    runner.close()
    assert runner.n_pages == 6
    assert runner.spec.context_length == 96  # no longer than the pool
    assert runner.spec.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert runner.spec.why == (
        "reference kernels were asked for; float32, the backend's default; 1 threads; 96 KV tokens as asked for"
    )


def test_the_pool_is_a_share_of_what_is_free() -> None:
    config = EngineConfig(page_size=16, mem_fraction=0.5)
    assert size_pool(config, 1024, 1 << 30, cap_bytes=None).n_pages == (1 << 29) // (16 * 1024)
    capped = size_pool(config, 1024, 64 << 30, cap_bytes=1 << 30)
    assert capped.n_pages == (1 << 30) // (16 * 1024)
    assert "limit of 1 GiB" in capped.why
    with pytest.raises(ModelLoadError, match="no room for a KV pool"):
        size_pool(config, 1024, 1000, cap_bytes=None)
    with pytest.raises(ModelLoadError, match=r"takes 9\.5 GiB; 4\.0 GiB are free"):
        size_pool(EngineConfig(kv_pool_tokens=10_000_000), 1024, 4 << 30, cap_bytes=None)
