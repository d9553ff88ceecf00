"""A tiny random model over bytes, real in everything but its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ramet as rt
from runtime.build import assemble
from runtime.config import EngineConfig
from runtime.models.loader import load_runner
from tests.runtime.toys import EOS, ByteTokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}


def write_tiny(folder: Path) -> Path:
    """A model folder without weights; load it as `dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def tiny_engine(folder: Path, **options: Any) -> rt.Engine:
    """An engine over the tiny model: float32, the reference backend, every page's owner checked at every step."""
    settings = {"kv_pool_tokens": 4096, "audit": True, **options}
    config = EngineConfig(
        model=str(folder), load_format="dummy", backend="reference", dtype="float32", threads=1, **settings
    )
    return rt.Engine.from_parts(assemble(config, load_runner(config), ByteTokenizer()))
