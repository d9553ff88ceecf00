"""Executes a select: all choices as suffix rows of one prefix, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from frontend_lang.driver import Driver
from frontend_lang.errors import Unsupported
from frontend_lang.ir import Select, Step
from frontend_lang.outcome import failure, gather
from frontend_lang.select import Row, Rows, Scored, first_difference, pick, scores
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
    ways = [Rows.of(joint, start)]
    if node.score == "unconditional":
        neutral = _neutral(driver)
        ways.append(Rows.of([np.concatenate([neutral, ids[start:]]) for ids in joint], len(neutral)))
    found = await gather(*(_row(driver, step, node, row) for rows in ways for row in rows.rows))
    answers = [found[: len(ways[0].rows)], found[len(ways[0].rows) :]]
    scored = []
    for index, ids in enumerate(joint):
        path = tuple(map(int, ids[start:]))
        taken = [_read(rows, answer, path, index) for rows, answer in zip(ways, answers, strict=False)]
        scored.append((Scored(path, *(tuple(map(_number, one)) for one in taken)), taken[0]))
    return [one for one, _ in scored], [logprobs for _, logprobs in scored]


def _read(
    rows: Rows, answers: Sequence[Sequence[TokenLogprob]], path: Sequence[int], choice: int
) -> tuple[TokenLogprob, ...]:
    """A choice's log-probabilities, token by token, from wherever they were scored."""
    places = rows.places[choice]
    return tuple(
        answers[place[0]][place[1]] if place is not None else TokenLogprob(token, None)
        for token, place in zip(path, places, strict=True)
    )


async def _row(driver: Driver, step: Step, node: Select, row: Row) -> tuple[TokenLogprob, ...]:
    if not row.asked:
        return ()
    request = driver.request(row.ids, _PREFILL, leaf=True, scores=tuple(row.asked))
    began, usage = driver.run.now(), Usage()
    found: list[TokenLogprob] = []
    async with aclosing(cast(Any, await driver.run.batcher.submit(request))) as stream:
        async for piece in stream:
            if piece.finish is not None and piece.finish.reason in ("error", "abort"):
                raise failure(piece.finish, step.where)
            found.extend(piece.prompt_logprobs)
            usage = piece.usage or usage
    driver.note("select", (node.name,), step, began, usage, row.ids, reusable=row.asked[0][0] - 1)
    return tuple(found)


def _neutral(driver: Driver) -> Ids:
    """What a text starts with when nothing is known: bos, or for models without one the end of a document."""
    backend = driver.run.prepared.backend
    return np.asarray(backend.bos_ids or sorted(backend.stop_ids)[:1], np.int32)


def _number(item: TokenLogprob) -> float:
    """The first token of an empty prompt has no distribution: it counts for nothing."""
    return 0.0 if item.logprob is None else item.logprob
