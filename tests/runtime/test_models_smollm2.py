"""The embedded model itself, against transformers running the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.gguf_source import GgufFile
from runtime.models.loader import load_runner
from runtime.text.tokenizer import Tokenizer
from tests.runtime.step_plans import Row, Seq, make_plan

N_NEW = 64
PAGES_EACH = 8
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea,",
    '{"name": "Ada", "age":',
    "Water boils at",
    "SELECT name FROM users WHERE",
    "The three laws of thermodynamics are:\n1.",
]


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> PreTrainedModel:
    """transformers' Llama with the file's weights (how they are read is tested in test_models_gguf)."""
    source = GgufFile(smollm2)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: source.tensor(name) for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_model(smollm2)
    return [tokenizer.encode(text) for text in PROMPTS]


def load(smollm2: Path, dtype: str) -> ModelRunner:
    return load_runner(
        EngineConfig(model=str(smollm2), backend="reference", dtype=dtype, kv_pool_tokens=16 * PAGES_EACH * 8)
    )


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> Iterator[ModelRunner]:
    runner = load(smollm2, "float32")
    yield runner
    runner.close()


def sequences(prompts: list[list[int]]) -> list[Seq]:
    pages = np.random.default_rng(0).permutation(PAGES_EACH * len(prompts)).reshape(len(prompts), -1)
    return [Seq(list(ids), pages[i].tolist(), table_row=i + 1) for i, ids in enumerate(prompts)]


def test_64_greedy_tokens_on_8_prompts_are_those_of_transformers(
    theirs: PreTrainedModel, runner: ModelRunner, prompts: list[list[int]]
) -> None:
    """One batch of 8 rows here. A greedy run of transformers is checked by teacher forcing: each of our tokens
    must be its best after the tokens before."""
    seqs = sequences(prompts)
    steps = [runner.launch(make_plan([Row(seq, 0, len(seq.tokens)) for seq in seqs], 16))]
    for n in range(N_NEW - 1):
        steps.append(
            runner.launch(make_plan([Row(seq, len(seq.tokens) + n, len(seq.tokens) + n + 1) for seq in seqs], 16))
        )
    generated = np.stack([step.result(300).tokens for step in steps], axis=1)
    for seq, new in zip(seqs, generated.tolist(), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([seq.tokens + new[:-1]])).logits[0, len(seq.tokens) - 1 :]
        assert logits.argmax(-1).tolist() == new


def test_logprobs_of_a_prompt(theirs: PreTrainedModel, runner: ModelRunner, prompts: list[list[int]]) -> None:
    tokens = prompts[7] + prompts[3]
    ours = score(runner, tokens)
    np.testing.assert_allclose(ours, scores_of(theirs, tokens), atol=1e-3)


def test_bfloat16_logprobs_stay_within_half_a_nat(
    theirs: PreTrainedModel, smollm2: Path, prompts: list[list[int]]
) -> None:
    """bfloat16 weights and activations: each logprob within 0.5, the mean within 0.05 of float32."""
    runner = load(smollm2, "bfloat16")
    tokens = prompts[7] + prompts[3]
    difference = score(runner, tokens) - scores_of(theirs, tokens)
    runner.close()
    assert np.abs(difference).max() < 0.5
    assert abs(difference.mean()) < 0.05


def score(runner: ModelRunner, tokens: list[int]) -> np.ndarray:
    seq = Seq(tokens, list(range(PAGES_EACH)))
    return runner.launch(make_plan([Row(seq, 0, len(tokens), score=True)], 16)).result(300).score_logprobs


def scores_of(theirs: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        table = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return table[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
