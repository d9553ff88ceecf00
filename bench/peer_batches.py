"""transformers as a peer: prompts that come at the same time go through its generate as one padded batch."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.bench.remote import Reply
from runtime.errors import RametError

GATHER_S = 0.03  # how long the first prompt of a batch waits for others


class TransformersPeer:
    """Satisfies `Target`; a context manager that ends its worker."""

    def __init__(self, name: str, python: Path, folder: Path, dtype: str, threads: int) -> None:
        self.name = name
        script = Path(__file__).with_name("peer_transformers.py")
        env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        self._process = subprocess.Popen(
            [str(python), "-P", str(script), str(folder), dtype, str(threads)],  # -P: names in bench/ shadow packages
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, int, Reply, threading.Event]] = []
        if self._read_line().strip() != "ready":
            raise RametError(f"{name} did not start.")

    def __enter__(self) -> TransformersPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def complete(self, prompt: str, max_tokens: int) -> Reply:
        reply, done = Reply(time.perf_counter()), threading.Event()
        self._waiting.append((prompt, max_tokens, reply, done))
        time.sleep(GATHER_S)
        with self._lock:
            if not done.is_set():
                self._run_batch()
        done.wait()
        return reply

    def object(self, prompt: str, schema: Mapping[str, Any], max_tokens: int) -> Reply:
        raise RametError(f"{self.name} has no structured output.")

    def _run_batch(self) -> None:
        batch, self._waiting = self._waiting, []
        asked = {"prompts": [one[0] for one in batch], "max_tokens": max(one[1] for one in batch)}
        begin, clock = time.time(), time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read_line())
        for (_, _, reply, done), text in zip(batch, answer["texts"], strict=True):
            reply.asked = clock  # gathering is ours, not its
            reply.text, reply.tokens, reply.prompt_tokens = text, answer["tokens"], answer["prompt_tokens"]
            reply.times = [clock + at - begin for at in answer["times"]]
            done.set()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()
