"""What came of a request: its text, its value, or whose fault it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from frontend_lang.backend import Piece
from frontend_lang.errors import (
    BackendLost,
    DeadlineExceeded,
    GenerationFailed,
    IncompleteValue,
    InvalidSchema,
    ProgramError,
    Where,
)
from frontend_lang.ir import Gen, Step
from frontend_lang.values import Info, Var
from runtime.errors import InvalidRequest, RametError, RequestTimeout, Unavailable
from runtime.messages import Finish, TokenLogprob, Usage

_GRAMMAR_PARAMS = ("regex", "json_schema", "grammar", "ebnf", "choices", "response_format", "structural_tag")


@dataclass(slots=True)
class Part:
    """One generation of a chain: the text before it (not for the first), and what came out."""

    step: Step
    before: list[Step] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    forced: set[int] = field(default_factory=set)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def gen(self) -> Gen[Any]:
        return cast("Gen[Any]", self.step.node)


async def gather(*work: Any) -> list[Any]:
    """Run all; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def settle(part: Part, usage: Usage | None) -> None:
    """Make the part's text its variable's value."""
    var: Var = part.step.data
    gen = part.gen
    info = Info(part.text, tuple(part.ids), _reason(part), tuple(part.logprobs), usage=usage)
    try:
        value = gen.parse(part.text) if gen.parse else part.text
    except ValueError as error:
        var.fail(incomplete(part, error), info)
        return
    var.settle(value, info)


def settle_many(step: Step, parts: Sequence[Part], usage: Usage | None) -> None:
    var: Var = step.data
    gen = cast("Gen[Any]", step.node)
    first = parts[0]
    info = Info(first.text, tuple(first.ids), _reason(first), tuple(first.logprobs), usage=usage)
    values = []
    for part in parts:
        try:
            values.append(gen.parse(part.text) if gen.parse else part.text)
        except ValueError as error:
            var.fail(incomplete(part, error), info)
            return
    var.settle(values, info)


def incomplete(part: Part, error: Exception) -> IncompleteValue:
    """Says which value could not be read from which text, and why the text ended."""
    shown = part.text if len(part.text) <= 80 else part.text[:77] + "..."
    cut = f" It was cut by max_tokens={part.gen.params.max_tokens}." if _reason(part) == "length" else ""
    return IncompleteValue(f"{part.gen.name!r} is no {part.gen.kind}: {shown!r}.{cut}", part.step.where, text=part.text)


def explain(error: RametError, where: Where) -> ProgramError:
    """The runtime's error as the program's, at its place."""
    if isinstance(error, RequestTimeout):
        return DeadlineExceeded(str(error), where)
    if isinstance(error, Unavailable):
        return BackendLost(str(error), where)
    if isinstance(error, InvalidRequest) and (error.param or "").split(".")[0] in _GRAMMAR_PARAMS:
        return InvalidSchema(str(error), where)
    return GenerationFailed(str(error), where)


def failure(finish: Finish, where: Where) -> ProgramError:
    """A request's bad end as the program's error."""
    message = finish.message or f"the request ended with {finish.reason!r}"
    if finish.status == 503:
        return BackendLost(message, where)
    if finish.status == RequestTimeout.status:
        return DeadlineExceeded(message, where)
    if (finish.param or "").split(".")[0] in _GRAMMAR_PARAMS:
        return InvalidSchema(message, where)
    return GenerationFailed(message, where)


def take(part: Part, piece: Piece, *, push: bool = True) -> None:
    part.forced.update(len(part.ids) + place for place in piece.forced)
    part.ids.extend(piece.token_ids)
    part.text += piece.text
    part.logprobs.extend(piece.logprobs)
    if push:
        part.step.data.push(piece.text)


def _reason(part: Part) -> str:
    return part.finish.reason if part.finish else ""


def cut(ids: list[int], bytes_of: list[bytes], at: int) -> tuple[list[int], str]:
    """Tokens that end by byte `at`, and the text between them and it."""
    n, seen = 0, 0
    while n < len(ids) and seen + len(bytes_of[n]) <= at:
        seen += len(bytes_of[n])
        n += 1
    rest = bytes_of[n][: at - seen].decode("utf-8", "replace") if n < len(ids) else ""
    return ids[:n], rest
