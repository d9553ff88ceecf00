"""The compiled program as text: what is constant, what is generated, and what will be shared."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frontend_lang.compiler import constant_ids, trace
from frontend_lang.holes import parts, readable
from frontend_lang.ir import Gen, RoleClose, RoleOpen, Step, Text, ToolCall, Tree, describe
from frontend_lang.session import Prepared, prepare

if TYPE_CHECKING:
    from frontend_lang.function import Program

WIDTH = 60
_NOTES = {
    "select": "scored in one message",
    "tool": "arguments constrained",
    "fork": "planned together; everything above is shared",
    "join": "generated ids are spliced, not tokenised again",
    "dynamic": "decided at run time",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the explanation. `tokens`: None where it depends on data; `upto`: it is a limit, not a count."""

    kind: str
    text: str
    line: int
    tokens: int | None = None
    upto: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One branch: its rows, and the lanes that leave after a row."""

    name: str
    rows: list[Row]
    children: dict[int, list[Lane]]


def explain(program: Program[Any, Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Lines of text, one a step, branches indented. Without a target there are no token counts."""
    lane, constant = layout(program, target, args, kwargs)
    head = f"{program.name}({', '.join(list(program.signature.parameters)[1:])})"
    if constant is not None:
        head += f": {constant} tokens are constant and can be prefetched"
    lines = [head]
    _write(lane, "", lines, shared=0)
    return "\n".join(lines)


def layout(
    program: Program[Any, Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Lane, int | None]:
    """The traced program with token counts, and how many tokens of it are constant from the start."""
    tree = trace(program, args, kwargs)
    if target is None:
        return asyncio.run(_lane(tree, None, ())), None
    prepared = prepare(target)

    async def both() -> tuple[Lane, int]:
        return await _lane(tree, prepared, ()), len(await constant_ids(prepared, tree))

    return prepared.wait(both())


async def _lane(tree: Tree, prepared: Prepared | None, roles: tuple[str, ...]) -> Lane:
    rows: list[Row] = []
    children: dict[int, list[Lane]] = {}
    chained = 0
    for index, step in enumerate(tree.steps):
        if isinstance(step.node, RoleOpen):
            roles = (*roles, step.node.role)
        chained = _chain(step, chained)
        rows.append(await _row(step, prepared, roles, chained))
        if index in tree.children:
            children[index] = [await _lane(child, prepared, roles) for child in tree.children[index]]
    return Lane(tree.name, rows, children)


def _chain(step: Step, before: int) -> int:
    """How many generations of one request precede this step's: text between keeps a chain, everything else ends it."""
    node = step.node
    if isinstance(node, Gen) and node.n == 1 and node.deadline is None:
        return before + 1
    constant = isinstance(node, Text) and not any(isinstance(part, str) for part in parts(node))
    return before if constant or isinstance(node, RoleOpen | RoleClose) else 0


async def _row(step: Step, prepared: Prepared | None, roles: tuple[str, ...], chained: int) -> Row:
    node, line = step.node, step.where.line
    kind, said = describe(node)
    if isinstance(node, Text):
        holes = [part for part in parts(node) if isinstance(part, str)]
        tokens = None if holes or prepared is None else len(await prepared.codec.encode([node]))
        return Row("text", readable(node.text), line, tokens, note="" if not holes else f"needs {', '.join(holes)}")
    if isinstance(node, RoleOpen | RoleClose):
        opening = isinstance(node, RoleOpen)
        tokens = None
        if prepared is not None:
            made = prepared.pieces.open(roles) if opening else prepared.pieces.close(roles)
            tokens = len(await prepared.codec.encode([Text(await made, special=True)]))
        return Row(kind, said, line, tokens)
    if isinstance(node, Gen):
        note = "same request as the gen before" if chained > 1 else ""
        return Row(kind, said, line, node.params.max_tokens, True, note)
    if isinstance(node, ToolCall):
        return Row(kind, said, line, node.params.max_tokens, True, _NOTES[kind])
    return Row(kind, said, line, note=_NOTES.get(kind, ""))


def _write(lane: Lane, indent: str, lines: list[str], shared: int) -> None:
    """One line a row; `shared`: known tokens that the branches above have put before this lane."""
    before = shared
    for index, row in enumerate(lane.rows):
        if row.kind == "end":
            before += row.tokens or 0
            continue
        lines.append(indent + _line(row, before))
        before += row.tokens or 0
        for child in lane.children.get(index, ()):
            lines.append(f"{indent}  branch {child.name!r}")
            _write(child, indent + "    ", lines, before)


def _line(row: Row, before: int) -> str:
    text = " ".join(row.text.split()) if row.kind == "text" else row.text
    text = text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
    shown = f'"{text}"' if row.kind == "text" else text
    count = "" if row.tokens is None else f"  [{'≤ ' if row.upto else ''}{row.tokens} tokens]"
    if row.kind == "fork" and before:
        count = f"  [{before} or fewer tokens shared]"
    note = f"  ({row.note})" if row.note else ""
    return f"{row.kind:8}{shown}{count}{note}  :{row.line}"
