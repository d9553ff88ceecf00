"""Executes a select: all choices as suffix rows of one prefix, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from frontend_lang.driver import Driver
from frontend_lang.errors import Unsupported
from frontend_lang.ir import Select, Step
from frontend_lang.outcome import failure, gather
from frontend_lang.select import Scored, first_difference, pick, scores, shared_starts
from frontend_lang.values import Info
from runtime.messages import Ids, TokenLogprob, Usage
from runtime.params import SamplingParams

if TYPE_CHECKING:
    from frontend_lang.values import Var

_PREFILL = SamplingParams(max_tokens=0, temperature=0.0)


async def run_select(driver: Driver, step: Step, node: Select) -> None:
    """Score the choices, append the best one as text, settle the variable."""
    if not driver.run.prepared.backend.able.scoring:
        raise Unsupported(
            f"{driver.run.prepared.backend.name} cannot score choices; use rt.gen(..., choices=...).", step.where
        )
    driver.begin()
    scored, logprobs = await _score(driver, step, node)
    values = scores(node.score, scored)
    best = pick(values, node.temperature, driver.seed(node.name))
    choice = node.choices[best]
    var: Var = step.data
    var.push(choice)
    await driver.context.add(choice, name=node.name)
    table = dict(zip(node.choices, values, strict=True))
    var.settle(choice, Info(choice, scored[best].ids, "select", logprobs[best], table))


async def _score(driver: Driver, step: Step, node: Select) -> tuple[list[Scored], list[tuple[TokenLogprob, ...]]]:
    context = driver.context
    prompt = np.asarray(await context.prompt(), np.int32)
    joint = [np.asarray(await context.prompt(choice), np.int32) for choice in node.choices]
    start = first_difference(prompt, joint)
    rows = await _rows(driver, step, node, joint, start)
    scored = [
        Scored(tuple(map(int, ids[start:])), tuple(_number(lp) for lp in row))
        for ids, row in zip(joint, rows, strict=True)
    ]
    if node.score == "unconditional":
        neutral = _neutral(driver)
        bare = [np.concatenate([neutral, ids[start:]]) for ids in joint]
        alone = await _rows(driver, step, node, bare, len(neutral))
        scored = [
            replace(choice, alone=tuple(_number(lp) for lp in row)) for choice, row in zip(scored, alone, strict=True)
        ]
    return scored, rows


async def _rows(
    driver: Driver, step: Step, node: Select, sequences: Sequence[Ids], start: int
) -> list[tuple[TokenLogprob, ...]]:
    """Log-probabilities of every sequence from `start` on, in one message; what sequences share is scored once."""
    starts = shared_starts(sequences, start)
    asked = [(ids, begin) for ids, (begin, _) in zip(sequences, starts, strict=True) if begin < len(ids)]
    answers = iter(await gather(*(_row(driver, step, node, ids, begin) for ids, begin in asked)))
    rows: list[tuple[TokenLogprob, ...]] = []
    for ids, (begin, source) in zip(sequences, starts, strict=True):
        shared = rows[source][: begin - start] if source < len(rows) else ()
        rows.append(shared + (next(answers) if begin < len(ids) else ()))
    return rows


async def _row(driver: Driver, step: Step, node: Select, ids: Ids, start: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of ids[start:], each given everything before it."""
    request = driver.request(ids, _PREFILL, leaf=True, prompt_logprobs_from=start)
    began, usage = driver.run.now(), Usage()
    found: list[TokenLogprob] = []
    async with aclosing(cast(Any, await driver.run.batcher.submit(request))) as stream:
        async for piece in stream:
            if piece.finish is not None and piece.finish.reason in ("error", "abort"):
                raise failure(piece.finish, step.where)
            found.extend(piece.prompt_logprobs)
            usage = piece.usage or usage
    driver.note("select", (node.name,), step, began, usage, ids, reusable=max(0, start - 1))
    return tuple(found)


def _neutral(driver: Driver) -> Ids:
    """What a text starts with when nothing is known: bos, or for models without one the end of a document."""
    backend = driver.run.prepared.backend
    return np.asarray(backend.bos_ids or sorted(backend.stop_ids)[:1], np.int32)


def _number(item: TokenLogprob) -> float:
    """The first token of an empty prompt has no distribution: it counts for nothing."""
    return 0.0 if item.logprob is None else item.logprob
