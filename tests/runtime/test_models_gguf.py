"""GGUF: every block type against the gguf package, names and row orders, and files that are broken."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from runtime.config import EngineConfig
from runtime.errors import ModelLoadError
from runtime.models.gguf_source import GgufFile, deinterleave, dequantize
from runtime.models.loader import load_runner
from runtime.models.safetensors_source import SafetensorsFolder
from tests.runtime.step_plans import Row, Seq, make_plan
from tests.runtime.tiny_models import save, tiny_model

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """What converters do to q and k of the llama architecture."""
    return rows.reshape(n_heads, 2, len(rows) // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(kind: str, path: Path, **changes: object) -> dict[str, np.ndarray]:
    """A tiny model as a float32 GGUF. Returns its weights under their Hugging Face names."""
    model = tiny_model(kind, **changes)
    c = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, c.vocab_size))])
    writer.add_token_types([1] * c.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for name, values in weights.items():
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2], 0)
        stored = interleave(values, heads) if kind == "llama" and heads else values
        writer.add_tensor(stored_name(name), np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_dequantised_as_the_gguf_package_does(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    if name in ("Q4_K", "Q5_K", "Q6_K"):  # no encoder: any bytes are a block, but keep the fp16 scales finite
        data = rng.integers(0, 60, (3, 4 * block_bytes), dtype=np.uint8)
    else:
        data = gguf.quantize(rng.standard_normal((3, 4 * block)).astype(np.float32), kind).view(np.uint8)
    np.testing.assert_array_equal(dequantize(data, kind).ravel(), gguf.dequantize(data, kind).ravel())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_names_and_row_orders_come_back(kind: str, tmp_path: Path) -> None:
    weights = write_gguf(kind, tmp_path / "m.gguf")
    source = GgufFile(tmp_path / "m.gguf")
    assert source.config.architecture == kind
    assert not source.config.tied
    for name, values in weights.items():
        np.testing.assert_array_equal(source.tensor(name).numpy(), values, err_msg=name)
        assert source.quantized(name) is None


def test_interleaving_is_undone_for_blocks_as_for_values() -> None:
    rows = np.arange(12 * 5).reshape(12, 5)
    assert torch.equal(deinterleave(torch.from_numpy(interleave(rows, 3)), 3), torch.from_numpy(rows))


def test_a_gguf_and_a_folder_of_the_same_weights_answer_alike(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "m.gguf")
    save(tiny_model("llama"), tmp_path / "folder")
    answers = []
    for model in ("m.gguf", "folder"):
        runner = load_runner(
            EngineConfig(model=str(tmp_path / model), backend="reference", kv_pool_tokens=64, threads=1)
        )
        assert runner.spec.eos_ids == (1,)
        plan = make_plan([Row(Seq([5, 9, 60, 2], [1]), 0, 4)], 16, n_top=5)
        answers.append(runner.launch(plan).result(30).top_logprobs.tolist())
        runner.close()
    assert answers[0] == answers[1]


def test_quantised_blocks_are_reachable_and_dequantise_to_the_tensor(smollm2: Path) -> None:
    source = GgufFile(smollm2)
    for name, qtype in (("model.layers.4.self_attn.q_proj.weight", "Q4_1"), ("model.embed_tokens.weight", "Q8_0")):
        blocks = source.quantized(name)
        assert blocks is not None
        assert blocks.qtype == qtype
        values = dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[qtype]).reshape(blocks.shape)
        np.testing.assert_array_equal(values, source.tensor(name).numpy())


@pytest.mark.parametrize("keep", [2, 100, 2000, -100])
def test_a_truncated_file_is_one_clear_sentence(keep: int, tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "whole.gguf")
    path = tmp_path / "cut.gguf"
    path.write_bytes((tmp_path / "whole.gguf").read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf .*(truncated|not a GGUF)"):
        GgufFile(path)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0),
        struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IIQ", 0, 0, 0),
        struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 5000,
    ],
    ids=["no alignment", "no shape", "deep"],
)
def test_a_header_that_makes_no_sense_is_one_clear_sentence(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + header + bytes(64))
    with pytest.raises(ModelLoadError, match=r"m\.gguf|'m'"):
        GgufFile(tmp_path / "m.gguf")


def test_an_unsupported_architecture_or_type_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture 'mamba'; supported: llama, mistral, qwen2, qwen3"):
        GgufFile(tmp_path / "m.gguf")

    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="type Q2_K; supported:"):
        GgufFile(tmp_path / "q.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'blk\.7\.attn_q\.weight'"):
        GgufFile(tmp_path / "m.gguf").tensor("model.layers.7.self_attn.q_proj.weight")


def test_a_folder_of_safetensors_is_read_by_name(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    source = SafetensorsFolder(save(model, tmp_path))
    for name, values in model.state_dict().items():
        assert torch.equal(source.tensor(name), values)
