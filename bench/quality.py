"""What quantisation costs: NLL per token of agent text, over float32 weights, activations and KV.

    python -m bench.quality [--model smollm2-135m] [--tokens 3000] [--checkpoint FOLDER] [--only NAME ...]

`--checkpoint` names a folder with the same weights in floating point (bench.peers_setup writes one), whose int8 and q4
are then made by Ramet. `--dither` first moves its weights off the 4-bit grid that they come from, by up to half a step:
a checkpoint like any that was never quantised, and worse by itself, so compare with its own "default" line.

Every variant scores the same tokens in the same windows through the native kernels. The reference is the model
file's weights expanded to float32.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kernels.base import AttnMeta
from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner, resolve_model
from runtime.text.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "agent_text.json.gz"
WINDOW, CHUNK, PAGE = 1024, 256, 16
EXACT = {"quantization": "none", "kv_dtype": "float32"}
VARIANTS: dict[str, dict[str, str]] = {  # of the GGUF file
    "float32": EXACT,
    "default (file's blocks, KV float16)": {},
    "default, KV float32": {"kv_dtype": "float32"},
    "default, KV bfloat16": {"kv_dtype": "bfloat16"},
    "default, KV int8": {"kv_dtype": "int8"},
    "default, KV fp8_e4m3": {"kv_dtype": "fp8_e4m3"},
    "default, KV fp8_e5m2": {"kv_dtype": "fp8_e5m2"},
}
MADE: dict[str, dict[str, str]] = {  # of a float checkpoint with the same weights
    "bfloat16": {"dtype": "bfloat16"},
    "default (float32, KV float16)": {},
    "int8": {"quantization": "int8"},
    "q4": {"quantization": "q4"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--dither", action="store_true")
    parser.add_argument("--only", nargs="*", default=None, metavar="NAME", help="variants beside float32")
    asked = parser.parse_args()
    ids = agent_tokens(Tokenizer.from_model(resolve_model(asked.model)), asked.tokens)
    print(f"{len(ids)} tokens of agent text, windows of {WINDOW}\n")
    print("| variant | NLL per token | over float32 |\n|---|---|---|")
    exact: float | None = None
    todo = [(name, asked.model, options) for name, options in VARIANTS.items()]
    if asked.checkpoint and asked.dither:
        asked.checkpoint = dithered(asked.checkpoint)
    if asked.checkpoint:
        todo += [(f"checkpoint, {name}", str(asked.checkpoint), options) for name, options in MADE.items()]
    for name, model, options in todo:
        if asked.only is not None and name != "float32" and name not in asked.only:
            continue
        config = EngineConfig(
            model=model, backend="native", kv_pool_tokens=4096, page_size=PAGE, threads=asked.threads, **options
        )
        cost = nll(load_runner(config), ids)
        exact = cost if exact is None else exact
        print(f"| {name} | {cost:.4f} | {cost - exact:+.4f} |", flush=True)


def agent_tokens(tokenizer: Tokenizer, limit: int) -> list[int]:
    lines = []
    for conversation in json.loads(gzip.decompress(TEXT.read_bytes())):
        for message in conversation["messages"]:
            calls = "".join(f"\n{call['name']}({call['arguments']})" for call in message.get("tool_calls", ()))
            lines.append(f"<|im_start|>{message['role']}\n{message['content'] or ''}{calls}<|im_end|>\n")
    return tokenizer.encode("".join(lines))[:limit]


def dithered(folder: Path) -> Path:
    """A copy whose linear weights are moved by up to half a 4-bit step of their group of 32."""
    copy, generator, moved = Path(tempfile.mkdtemp()), torch.Generator().manual_seed(0), {}
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, copy)
    for name, weight in load_file(folder / "model.safetensors").items():
        moved[name] = weight.float()
        if "proj" in name:
            groups = weight.float().view(len(weight), -1, 32)
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
            noise = torch.rand(groups.shape, generator=generator) - 0.5
            moved[name] = (groups + noise * step).view_as(weight).contiguous()
    save_file(moved, copy / "model.safetensors")
    return copy


def nll(runner: ModelRunner, ids: list[int]) -> float:
    """Mean negative log-likelihood of every token after a window's first."""
    try:
        return runner._device.call(lambda: _nll(runner, ids))
    finally:
        runner.close()


def _nll(runner: ModelRunner, ids: list[int]) -> float:
    total, n = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        for begin, meta in steps(len(window)):
            part = torch.tensor(window[begin : begin + CHUNK])
            hidden = runner._model.forward(part, meta.positions.long(), meta, runner._kv)
            targets = torch.tensor(window[begin + 1 : begin + 1 + len(part)])
            scores = runner._model.logits(hidden[: len(targets)]).double().log_softmax(-1)
            total -= scores.gather(1, targets[:, None]).sum().item()
            n += len(targets)
    return total / n


def steps(n_tokens: int) -> Iterator[tuple[int, AttnMeta]]:
    """A window of one sequence, chunk by chunk, in pages 0 and on."""
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.long)
    for begin in range(0, n_tokens, CHUNK):
        end = min(begin + CHUNK, n_tokens)
        n_pages = -(-end // PAGE)
        positions = torch.arange(begin, end, dtype=torch.int32)
        yield (
            begin,
            AttnMeta(
                page_size=PAGE,
                qo_indptr=i32(0, end - begin),
                kv_indptr=i32(0, n_pages),
                kv_indices=torch.arange(n_pages, dtype=torch.int32),
                last_page_len=i32(end - (n_pages - 1) * PAGE),
                kv_lens=i32(end),
                positions=positions,
                slots=positions.long(),
                copy_src=none,
                copy_dst=none,
                share_indptr=i32(0),
                share_n_pages=i32(),
            ),
        )


if __name__ == "__main__":
    main()
