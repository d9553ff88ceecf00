"""Tokens per second under a grammar against free text of exactly the same lengths, on one engine, in turn.

A round is four runs of the same prompts: masked (no jumps), free text as long as those answers, jumping, free text as
long as those. Greedy answers are the same every time, so a round differs from the next by the machine's noise only; the
order turns from round to round. Two figures are reported: the median of the rounds' ratios with its own error, and the
ratio of the fastest runs, which a neighbour that slows a machine down by a tenth for seconds disturbs the least.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ramet as rt
from bench.structured_shapes import SHAPES, prompts
from runtime.scheduler.grammar import JumpRule

SPREAD = 1.858  # a median's standard error from the median absolute deviation, times the root of the count


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a batch until the engine is idle again."""

    wall_s: float
    device_s: float
    steps: int

    @property
    def host_s(self) -> float:
        """While the device did nothing: planning, committing and masks that nothing overlapped."""
        return self.wall_s - self.device_s


@dataclass(frozen=True, slots=True)
class Arm:
    """What is repeated: answers under a grammar, or free text of given lengths."""

    lengths: tuple[int, ...]
    canonical: float
    runs: list[Run]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the table: rounds of masked, its free text, jumping, its free text."""

    masked: Arm
    masked_free: Arm
    jumping: Arm
    jumping_free: Arm

    def ratios(self, over: str, under: str, of: str = "wall_s") -> list[float]:
        a, b = (getattr(self, name).runs for name in (over, under))
        return [getattr(x, of) / getattr(y, of) for x, y in zip(a, b, strict=True)]

    def fastest(self, over: str, under: str) -> float:
        a, b = (min(run.wall_s for run in getattr(self, name).runs) for name in (over, under))
        return a / b


def allow_jumps(one: rt.Engine, on: bool) -> None:
    """What `jump_forward` would say at start: the arms share one engine, so that they alternate within a second."""
    scheduler: Any = one._parts.scheduler
    state = scheduler.state
    if state.config.jump_forward != on:
        state.config = dataclasses.replace(state.config, jump_forward=on)
        scheduler._pipeline._jumps = JumpRule(state)


def timed_run(one: rt.Engine, submits: list[Any]) -> tuple[Run, list[Any]]:
    scheduler: Any = one._parts.scheduler
    stats = scheduler.state.stats
    steps, device = stats.steps, stats.device_s.total
    start = time.perf_counter()
    groups = one._wait(one.generator.complete_many(submits))
    while scheduler.busy:  # a step behind the last token is a cost too
        time.sleep(5e-5)
    run = Run(time.perf_counter() - start, stats.device_s.total - device, stats.steps - steps)
    return run, [group[0] for group in groups]


def measure(one: rt.Engine, shape: str, batch: int, max_tokens: int, rounds: int) -> Row:
    submit = one.submit_of
    asked = prompts(batch)

    def constrained() -> list[Any]:
        return [submit(p, json_schema=SHAPES[shape], temperature=0, max_tokens=max_tokens) for p in asked]

    def free(lengths: tuple[int, ...]) -> list[Any]:
        return [submit(p, temperature=0, max_tokens=n, ignore_eos=True) for p, n in zip(asked, lengths, strict=True)]

    def learn(jumps: bool) -> Arm:
        """Twice: what the first run compiled and cached is there in the second."""
        allow_jumps(one, jumps)
        for _ in range(2):
            answers = timed_run(one, constrained())[1]
        lengths = tuple(a.usage.completion_tokens for a in answers)
        return Arm(lengths, statistics.mean(is_canonical(one, a) for a in answers), [])

    masked, jumping = learn(False), learn(True)
    row = Row(masked, Arm(masked.lengths, 1.0, []), jumping, Arm(jumping.lengths, 1.0, []))
    arms: list[tuple[Arm, bool, Callable[[], list[Any]]]] = [
        (row.masked, False, constrained),
        (row.masked_free, False, lambda: free(masked.lengths)),
        (row.jumping, True, constrained),
        (row.jumping_free, True, lambda: free(jumping.lengths)),
    ]
    for _, _, make in arms[1::2]:
        timed_run(one, make())
    for turn in range(rounds):
        for at in range(4):
            arm, jumps, make = arms[(at if turn % 2 else 3 - at)]
            allow_jumps(one, jumps)
            arm.runs.append(timed_run(one, make())[0])
    return row


def is_canonical(one: rt.Engine, answer: Any) -> bool:
    """Whether the answer's tokens, without the one that ended it, are the tokenizer's own for its text."""
    ids = [t for t in answer.token_ids if t not in one.generator.eos_ids]
    return ids == one.tokenizer.encode(answer.text, False)


def error_of(values: list[float]) -> float:
    """The standard error of the median."""
    middle = statistics.median(values)
    return SPREAD * statistics.median(abs(v - middle) for v in values) / len(values) ** 0.5


HEAD = (
    "| batch | schema | tokens | free tok/s | masks, no jumps | fastest runs | outside the device | with jumps × free "
    "| fastest runs | of device time | steps saved | canonical without / with jumps |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def line(batch: int, shape: str, row: Row) -> str:
    median = statistics.median
    cost, cost_fastest = row.ratios("masked", "masked_free"), row.fastest("masked", "masked_free")
    gain, gain_fastest = row.ratios("jumping_free", "jumping"), row.fastest("jumping_free", "jumping")
    device = row.ratios("jumping_free", "jumping", "device_s")
    host = median(r.host_s for r in row.masked.runs) - median(r.host_s for r in row.masked_free.runs)
    host /= median(r.wall_s for r in row.masked_free.runs)
    free_rate = row.masked.tokens / median(r.wall_s for r in row.masked_free.runs)
    saved = 1 - median(r.steps for r in row.jumping.runs) / median(r.steps for r in row.jumping_free.runs)
    return (
        f"| {batch} | {shape} | {row.masked.tokens} / {row.jumping.tokens} | {free_rate:.0f} "
        f"| {median(cost) - 1:+.1%} ± {error_of(cost):.1%} | {cost_fastest - 1:+.1%} | {host:+.1%} "
        f"| {median(gain):.2f} ± {error_of(gain):.2f} | {gain_fastest:.2f} | {median(device):.2f} | {saved:.0%} "
        f"| {row.masked.canonical:.0%} / {row.jumping.canonical:.0%} |"
    )
