"""One agent program run one way, and what it cost."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import ramet as rt
from bench.program_calls import CALLS, Client
from bench.program_shapes import run
from bench.program_texts import SMALL, Sizes
from frontend_lang.record import Event, optimum
from runtime.messages import Usage


@dataclass(frozen=True, slots=True)
class Measure:
    """Tokens as the server counts them. `optimum`: prompt tokens that a cache holding all that was seen would reuse.

    `retokenised`: tokens already read or written by the model that were turned into ids from text once more.
    `steps`, `computed`, `device_s`: what the device did for it: steps, tokens in all of them, and how long that took.
    """

    shape: str
    way: str
    wall_s: float
    requests: int
    prompt: int
    reused: int
    prefilled: int
    generated: int
    optimum: int
    retokenised: int
    steps: int = 0
    computed: int = 0
    device_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.reused / self.optimum if self.optimum else 1.0


def by_dsl(backend: rt.HttpBackend, shape: str, size: Sizes, way: str = "DSL") -> Measure:
    totals = run(backend, shape, size)
    return Measure(
        shape,
        way,
        totals.wall_s,
        totals.requests,
        totals.prompt,
        totals.reused,
        totals.prefilled - totals.forced,  # what a grammar forces is computed like a prompt, but is none
        totals.generated,
        totals.optimum,
        totals.retokenised,
    )


def by_hand(url: str, backend: rt.HttpBackend, shape: str, size: Sizes, *, side_by_side: bool) -> Measure:
    """The calls of the OpenAI SDK. The client is made before the clock starts, as a script makes it once."""

    async def work() -> tuple[float, Client]:
        client = Client(url, backend.model, side_by_side=side_by_side)
        began = time.perf_counter()
        await CALLS[shape](client, size)
        wall_s = time.perf_counter() - began
        await client.close()
        return wall_s, client

    wall_s, client = asyncio.run(work())
    best = reusable(backend, client.seen)
    return Measure(
        shape,
        "by hand, side by side" if side_by_side else "by hand, one by one",
        wall_s,
        client.requests,
        client.prompt,
        client.cached,
        client.prompt - client.cached,
        client.generated,
        best,
        best,
    )


def reusable(backend: rt.HttpBackend, seen: Sequence[Sequence[Any]]) -> int:
    """Tokens that could have been reused by requests known by their texts: [messages or text, answer] each."""
    none = np.zeros(0, np.int32)
    events = []
    for prompt, answer in seen:
        if isinstance(prompt, str):
            ids = backend.tokenizer.encode(prompt, add_special=True)
        else:
            ids = backend.renderer.render(prompt, add_generation_prompt=True)
        made = backend.tokenizer.encode(answer, add_special=False)
        output = np.asarray([*made, 0], np.int32) if made else none
        events.append(Event("", "", (), 0, 0.0, 0.0, Usage(), np.asarray(ids, np.int32), output, reusable=len(ids) - 1))
    return optimum(events)


class Foreign:
    """SGLang's frontend in an interpreter of its own."""

    def __init__(self, python: Path, url: str, size: Sizes) -> None:
        self._url = url
        command = [str(python), "-m", "bench.program_sglang", url, *(["--small"] if size == SMALL else [])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.shapes: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit("SGLang's frontend ended; run `python -m bench.program_sglang URL` to see why")

    def measure(self, backend: rt.HttpBackend, shape: str) -> Measure:
        before = counted(self._url)[:4]
        assert self._process.stdin is not None
        self._process.stdin.write(shape + "\n")
        self._process.stdin.flush()
        told = self._read()
        after = counted(self._url)[:4]
        requests, prompt, reused, generated = (b - a for a, b in zip(before, after, strict=True))
        best = reusable(backend, told["seen"])
        return Measure(
            shape,
            "SGLang frontend",
            told["wall_s"],
            requests,
            prompt,
            reused,
            prompt - reused,
            generated,
            best,
            best,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def counted(url: str) -> tuple[Any, ...]:
    """The server's own counters: requests, prompt tokens, reused and generated ones; steps, their tokens and time."""
    stats = httpx.get(f"{url}/server_info", timeout=30).json().get("internal_states", [{}])[0]
    found = [int(stats.get(key, 0)) for key in ("received", "prompt_tokens", "reused", "generated", "steps")]
    return (*found, int(stats.get("step_tokens_total", 0)), stats.get("device_s_total", 0.0))


def metered(url: str, way: Callable[[], Measure]) -> Measure:
    """A measure with what the device did for it."""
    before = counted(url)
    told = way()
    after = counted(url)
    steps, computed, device_s = (b - a for a, b in zip(before[4:], after[4:], strict=True))
    return replace(told, steps=steps, computed=computed, device_s=device_s)


def flush(url: str) -> None:
    """Empty the server's cache."""
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()


def median(rounds: Sequence[Measure]) -> Measure:
    """The first round, with the median of all of what the clock has a part in."""
    times = {name: statistics.median(getattr(m, name) for m in rounds) for name in ("wall_s", "device_s")}
    counts = {name: statistics.median_low(getattr(m, name) for m in rounds) for name in ("steps", "computed")}
    return replace(rounds[0], **times, **counts)
