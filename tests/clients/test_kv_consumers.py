"""What our KV events are to SGLang's and vLLM's own decoders: their structs, from their wheels, read our payload."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from radix.events import AllBlocksCleared, BlockRemoved, BlockStored
from radix.tree import Namespace
from runtime.serve.kv_events import event_map

EVENTS = (
    BlockStored((-5, 2**62), 7, tuple(range(32)), 16, Namespace()),
    BlockStored((1,), None, tuple(range(16)), 16, Namespace(adapter=3)),
    BlockRemoved((-5, 7)),
    AllBlocksCleared(),
)
CODE = """
import json, sys, msgspec
from tests.clients.foreign import stand_in
stand_in()
from {module} import {batch} as Batch
batch = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Batch)
print("DECODED", json.dumps([[type(e).__name__, list(getattr(e, "block_hashes", []))] for e in batch.events]))
"""


@pytest.mark.parametrize(
    ("module", "batch"),
    [("sglang.srt.disaggregation.kv_events", "KVEventBatch"), ("vllm.distributed.kv_events", "KVEventBatch")],
)
def test_their_own_structs_decode_our_batches(module: str, batch: str) -> None:
    payload = msgspec.msgpack.encode([1.5, [event_map(event) for event in EVENTS], None])
    code = CODE.format(module=module, batch=batch)
    done = subprocess.run([sys.executable, "-c", code, payload.hex()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("DECODED ")]
    assert json.loads(line.removeprefix("DECODED ")) == [
        ["BlockStored", [-5, 2**62]],
        ["BlockStored", [1]],
        ["BlockRemoved", [-5, 7]],
        ["AllBlocksCleared", []],
    ]
