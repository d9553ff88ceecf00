"""SGLang's `bench_serving` and vLLM's `bench serve`, unmodified: every request ends, and their counts agree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lang.engines import toy_engine, toy_server
from tests.serve.scripted import byte_tokenizer

N, PROMPT, ANSWER = 12, 24, 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_engine(latency_s=0.002) as engine, toy_server(engine) as url:
        yield url


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The server's tokenizer as a folder that transformers loads."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 16384}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def run(module: str, *args: str) -> str:
    command = [sys.executable, "-m", "tests.clients.foreign", module, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_sglang_bench_serving(url: str, tokenizer: str, tmp_path: Path, backend: str) -> None:
    out = tmp_path / "out.jsonl"
    run(
        "sglang.benchmark.serving",
        *("--backend", backend, "--base-url", url, "--model", "fake", "--tokenizer", tokenizer),
        *("--dataset-name", "random-ids", "--num-prompts", str(N), "--random-range-ratio", "1"),
        *("--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)),
        *("--max-concurrency", "4", "--output-file", str(out), "--flush-cache", "--cache-report"),
    )
    result = json.loads(out.read_text().splitlines()[-1])
    assert result["completed"] == N
    assert result["total_output_tokens"] == N * ANSWER
    assert 0 < result["mean_ttft_ms"] < result["mean_e2e_latency_ms"]


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(url: str, tokenizer: str, tmp_path: Path, backend: str, endpoint: str) -> None:
    run(
        "vllm-bench-serve",
        *("--backend", backend, "--base-url", url, "--endpoint", endpoint, "--model", "fake"),
        *("--tokenizer", tokenizer, "--dataset-name", "random", "--num-prompts", str(N), "--ignore-eos"),
        *("--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER), "--max-concurrency", "4"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json"),
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["completed"] == N
    assert result["total_output_tokens"] == N * ANSWER
    assert result["mean_ttft_ms"] > 0
    assert result["mean_tpot_ms"] > 0
