"""Traces a program into its IR without running a model, and prefetches what is constant in it.

A trace runs the function over a recording state. Arguments that are not given, and every generated value, are
holes: they may flow into text, and a program that looks at one ends the trace there (its rest is `Dynamic`).
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from frontend_lang.context import Context
from frontend_lang.errors import ProgramError, check_text
from frontend_lang.holes import DataDependent, Hole, parts
from frontend_lang.ids import short_id
from frontend_lang.ir import (
    RoleClose,
    RoleOpen,
    Text,
    Tree,
)
from frontend_lang.record import Event, common_prefix
from frontend_lang.session import Batcher, Prepared
from frontend_lang.tracer import Tracer
from runtime.messages import Hints, Submit, Usage, pack_ids
from runtime.params import SamplingParams
from runtime.validate import MAX_FANOUT

if TYPE_CHECKING:
    from frontend_lang.function import Program

MIN_PREFETCH = 8  # tokens; less is not worth a request
LOOK_CHARS = 32  # of a value beyond where the text of all values agrees
MAX_STARTS = 64  # different values looked at


def trace(
    program: Program[Any, Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    only_prefix: bool = False,
) -> Tree:
    """The program's IR with these arguments; those missing are holes. Raises what the program itself gets wrong.

    `only_prefix`: stop at the first thing that is not constant, so that no more of the user's code runs than needed.
    """
    bound = program.signature.bind_partial(None, *args, **(kwargs or {})).arguments
    state = Tracer(program.name, Tree("main"), only_prefix=only_prefix)
    given = dict(bound)
    for name, parameter in list(program.signature.parameters.items())[1:]:
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in given and parameter.default is parameter.empty and not several:
            given[name] = Hole(name)
    first = next(iter(program.signature.parameters))
    given[first] = state
    try:
        _run(program, given)
    except DataDependent as why:
        state.end(str(why))
    except ProgramError:
        raise
    except Exception as error:  # most likely a hole went where only a real value can go
        state.end(f"it needs a value ({type(error).__name__}: {error})")
    return state.tree


def _run(program: Program[Any, Any], given: dict[str, Any]) -> None:
    call = inspect.BoundArguments(program.signature, given)
    made = program.fn(*call.args, **call.kwargs)
    if not inspect.iscoroutine(made):
        return
    try:
        made.send(None)
    except StopIteration:
        return
    finally:
        made.close()
    raise DataDependent("it awaits something outside the program")


# ---- the constant beginning ---------------------------------------------------------------------------------


async def constant_ids(prepared: Prepared, tree: Tree, known: Mapping[str, Sequence[str]] | None = None) -> list[int]:
    """Ids of everything before the first hole or generation that no later text can change.

    `known`: for an argument, its values across a batch: the tokens with which all begin count too.
    """
    context = Context(prepared.codec)
    roles: tuple[str, ...] = ()
    for step in tree.steps:
        node = step.node
        if isinstance(node, RoleOpen):
            roles = (*roles, node.role)
            await context.add(await prepared.pieces.open(roles), special=True)
        elif isinstance(node, RoleClose):
            await context.add(await prepared.pieces.close(roles), special=True)
        elif isinstance(node, Text):
            if not context.ids and not context.spans:
                context.ids.extend(prepared.backend.bos_ids)
            for part in parts(node):
                if isinstance(part, str):
                    return await _common_ids(context, (known or {}).get(part, ()))
                await context.add(part.text, special=part.special)
        else:
            break
    await context.settle()
    return list(context.ids)


async def prefetch(
    program: Program[Any, Any],
    prepared: Prepared,
    items: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] = (),
    batcher: Batcher | None = None,
) -> tuple[int, Event | None]:
    """Have what all items begin with computed and cached. Returns (its length in tokens, the request it took)."""
    if not prepared.backend.able.prefetch:
        return 0, None
    same, known = _common_arguments(program, items)
    try:
        tree = trace(program, (), same, only_prefix=True)
    except ProgramError:
        return 0, None  # the runs themselves will say so, each with its place
    ids = await constant_ids(prepared, tree, known)
    if len(ids) < MIN_PREFETCH:
        return len(ids), None
    name = short_id(program.name)
    request = Submit(
        rid=f"{name}/prefetch/{secrets.token_hex(4)}",
        tokens=pack_ids(ids),
        params=SamplingParams(max_tokens=0),
        hints=Hints(program_id=name, expected_fanout=min(len(items), MAX_FANOUT)),
        client=name,
    )
    usage, began = Usage(prompt_tokens=len(ids)), time.monotonic()
    async with aclosing(cast(Any, await (batcher or prepared.batcher()).submit(request))) as stream:
        async for piece in stream:
            usage = piece.usage or usage
    prompt = np.asarray(ids, np.int32)
    took = time.monotonic() - began
    return len(ids), Event(
        "main", "prefetch", (), 0, 0.0, took, usage, prompt, np.zeros(0, np.int32), reusable=len(ids) - 1
    )


def _common_arguments(
    program: Program[Any, Any], items: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """(arguments equal in all items, the texts of those that differ)."""
    if not items:
        return {}, {}
    bound = []
    for args, kwargs in items:
        call = program.signature.bind(None, *args, **kwargs)
        call.apply_defaults()
        bound.append(dict(list(call.arguments.items())[1:]))
    same: dict[str, Any] = {}
    known: dict[str, list[str]] = {}
    for name, value in bound[0].items():
        values = [one[name] for one in bound]
        if all(_same(value, other) for other in values):
            same[name] = value
        else:
            known[name] = [other if isinstance(other, str) and _is_text(other) else "" for other in values]
            same[name] = Hole(name)
    return same, known


def _is_text(value: str) -> bool:
    """Whether a tokenizer takes it: the run that is given what none takes will say so."""
    try:
        check_text(value, "The argument")
    except ProgramError:
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, str | int | float | tuple | frozenset) and a == b)


async def _common_ids(context: Context, values: Sequence[str]) -> list[int]:
    """The tokens with which the context goes on whichever of the values follows.

    Values are looked at as far as their text agrees and a little beyond, where tokens still may.
    """
    if not values or not min(values):
        await context.settle()
        return list(context.ids)
    low, high = min(values), max(values)
    n = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    starts = list(dict.fromkeys(value[: n + LOOK_CHARS] for value in values))[:MAX_STARTS]
    lines = [np.asarray(await context.prompt(start), np.int32) for start in starts]
    same = min((common_prefix(lines[0], line) for line in lines[1:]), default=len(lines[0]))
    return [int(token) for token in lines[0][:same]]
