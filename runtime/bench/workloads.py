"""The work that servers are compared on. A workload takes a target and a salt, so that no two runs share a prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from runtime.bench.remote import Reply, Target

WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper", "kelp", "pine")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "category": {"enum": ["tree", "water", "stone", "animal"]},
        "size_in_meters": {"type": "integer", "minimum": 0, "maximum": 999},
        "description": {"type": "string", "maxLength": 40},
        "is_alive": {"type": "boolean"},
    },
    "required": ["name", "category", "size_in_meters", "description", "is_alive"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a workload."""

    name: str
    unit: str
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """`run` gives one figure for each of `measures`."""

    name: str
    about: str
    measures: tuple[Measure, ...]
    run: Callable[[Target, str], tuple[float, ...]]


def text_of(n_words: int, salt: str) -> str:
    """Words of one or two tokens each; no two salts share a beginning."""
    return salt + ": " + " ".join(WORDS[(i * 7 + len(salt) * 3 + i // 16) % 12] for i in range(n_words))


def together(target: Target, prompts: Sequence[str], max_tokens: int) -> tuple[float, list[Reply]]:
    """Seconds until all are answered, and the answers."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: target.complete(prompt, max_tokens), prompts))
    return time.perf_counter() - begin, replies


def single(target: Target, salt: str) -> tuple[float, ...]:
    return (target.complete(text_of(40, salt), 129).tokens_per_s,)


def prefill(target: Target, salt: str) -> tuple[float, ...]:
    reply = target.complete(text_of(380, salt), 1)
    return (reply.prompt_tokens / reply.first_s,)


def fanout(target: Target, salt: str) -> tuple[float, ...]:
    prefix = text_of(1210, salt)
    return (together(target, [f"{prefix}\nQuestion {i}: what now?" for i in range(16)], 32)[0],)


def agents(target: Target, salt: str) -> tuple[float, ...]:
    """Four agents, six turns each: every turn answers with a call, then gets a tool's result."""
    system = text_of(450, salt)

    def work(agent: int) -> None:
        context = f"{system}\nAgent {agent}, use your tools."
        for turn in range(6):
            answer = target.complete(context, 24).text
            context += f"{answer}\nResult: {text_of(40, f'{salt} {agent} {turn}')}\n"

    begin = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    return (time.perf_counter() - begin,)


def unshared(target: Target, salt: str) -> tuple[float, ...]:
    return (together(target, [text_of(150, f"{i} {salt}") for i in range(12)], 32)[0],)


def structured(target: Target, salt: str) -> tuple[float, ...]:
    """Four objects at once, then as many tokens of free text: the rate under a schema, and over the free rate."""
    prompts = [f"{text_of(20, f'{i} {salt}')}\nDescribe the first word as a JSON object." for i in range(4)]
    target.object(prompts[0] + " Briefly.", SCHEMA, 96)  # the schema is compiled once, before the clock starts
    begin = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda prompt: target.object(prompt, SCHEMA, 96), prompts))
    seconds, tokens = time.perf_counter() - begin, sum(reply.tokens for reply in replies)
    free_prompts = [
        f"{text_of(20, f'free {i} {salt}')}\nDescribe the first word in prose, at length." for i in range(4)
    ]
    free_s, free = together(target, free_prompts, max(2, round(tokens / 4)))
    rate = tokens / seconds
    return rate, rate / (sum(reply.tokens for reply in free) / free_s)


def burst(target: Target, salt: str) -> tuple[float, ...]:
    """Four running streams; then four long prompts come in. Their worst gap, and that over the p99 without a burst."""
    with ThreadPoolExecutor(8) as pool:
        quiet = [gap for reply in together(target, [text_of(30, f"{i} q {salt}") for i in range(4)], 48)[1]
                 for gap in reply.gaps]  # fmt: skip
        streams = [pool.submit(target.complete, text_of(30, f"{i} s {salt}"), 96) for i in range(4)]
        time.sleep(0.5)
        late = [pool.submit(target.complete, text_of(750, f"late {i} {salt}"), 1) for i in range(4)]
        gaps = [gap for stream in streams for gap in stream.result().gaps]
        for one in late:
            one.result()
    return max(gaps), max(gaps) / statistics.quantiles(quiet, n=100)[98]


WORKLOADS: dict[str, Workload] = {
    work.name: work
    for work in (
        Workload("single", "one stream", (Measure("decode, 1 stream", "tok/s", True),), single),
        Workload("prefill", "one prompt of about 500 tokens",
                 (Measure("prefill of 500 tokens", "tok/s", True),), prefill),
        Workload("fanout", "16 answers over one 1.6k-token prefix",
                 (Measure("16-way fan-out over 1.6k tokens", "s"),), fanout),
        Workload("agents", "4 tool agents, 6 turns each, one system prompt",
                 (Measure("4 agents × 6 turns", "s"),), agents),
        Workload("unshared", "12 prompts that share nothing", (Measure("12 prompts, nothing shared", "s"),), unshared),
        Workload("json", "objects under a schema, and free text of the same length",
                 (Measure("JSON, 4 streams", "tok/s", True), Measure("JSON / free", "×", True)), structured),
        Workload("burst", "long prompts over running streams",
                 (Measure("worst gap under a prefill burst", "s"), Measure("worst gap / ITL p99", "×")), burst),
    )
}  # fmt: skip
