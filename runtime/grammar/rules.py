"""A context-free grammar as values; printers turn it into each backend's language.

`Leaf` is a token for a lexer: one regular expression, intersected with further ones and with the complements of
others. `Native` is a JSON Schema that only llguidance reads as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.grammar.regular import NOTHING, Regex
from runtime.grammar.work import step


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """`narrow`: a subset for a printer that cannot write the whole. `where`, `what` name it in messages."""

    regex: Regex
    also: tuple[Regex, ...] = ()
    never: tuple[Regex, ...] = ()
    narrow: Regex | None = field(default=None, compare=False)
    where: str = field(default="", compare=False)
    what: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Native:
    schema: str
    where: str = field(default="", compare=False)
    what: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str


@dataclass(frozen=True, slots=True)
class Join:
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Many:
    item: Expr
    low: int
    high: int | None


Expr = Text | Leaf | Native | Rule | Join | Choice | Many
NOTHING_FITS = Choice(())
EMPTY_TEXT = Join(())
ROOT = "root"


@dataclass(frozen=True, slots=True)
class Grammar:
    """`rules[ROOT]` is where it starts. An expression `NOTHING_FITS` there means that no text matches."""

    rules: Mapping[str, Expr]

    @property
    def root(self) -> Expr:
        return self.rules[ROOT]


def join(*items: Expr) -> Expr:
    """Concatenation, flattened; neighbouring texts are merged, so what is forced is one piece."""
    step()
    flat: list[Expr] = []
    for item in items:
        for part in item.items if isinstance(item, Join) else (item,):
            if isinstance(part, Choice) and not part.items:
                return NOTHING_FITS
            if not isinstance(part, Text):
                flat.append(part)
            elif flat and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].text + part.text)
            elif part.text:
                flat.append(part)
    return flat[0] if len(flat) == 1 else Join(tuple(flat))


def choice(items: Iterable[Expr]) -> Expr:
    step()
    flat: dict[Expr, None] = {}
    for item in items:
        for part in item.items if isinstance(item, Choice) else (item,):
            flat[part] = None
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def many(item: Expr, low: int = 0, high: int | None = None) -> Expr:
    if item == NOTHING_FITS and low > 0:
        return NOTHING_FITS
    if high == 0 or item in (NOTHING_FITS, EMPTY_TEXT):
        return EMPTY_TEXT
    return item if low == high == 1 else Many(item, low, high)


def optional(item: Expr) -> Expr:
    return many(item, 0, 1)


def prune(rules: Mapping[str, Expr]) -> Grammar:
    """Drop what can never be completed: alternatives without a finite text, and rules nobody reaches."""
    productive: set[str] = set()
    open_rules = dict(rules)
    while True:
        before = len(productive)
        step(1 + len(open_rules) // 16)
        for name, expr in open_rules.items():  # what a rule refers to mostly stands before it: few passes
            if _completes(expr, productive):
                productive.add(name)
        if len(productive) == before:
            break
        open_rules = {name: expr for name, expr in open_rules.items() if name not in productive}
    kept = {name: _without(expr, productive) for name, expr in rules.items() if name in productive}
    kept.setdefault(ROOT, NOTHING_FITS)
    return Grammar({name: kept[name] for name in _reachable(kept)})


def _completes(expr: Expr, productive: set[str]) -> bool:
    match expr:
        case Leaf():
            return expr.regex != NOTHING
        case Rule(name):
            return name in productive
        case Join(items):
            return all(_completes(i, productive) for i in items)
        case Choice(items):
            return any(_completes(i, productive) for i in items)
        case Many(item, low, _):
            return low == 0 or _completes(item, productive)
    return True


def _without(expr: Expr, productive: set[str]) -> Expr:
    match expr:
        case Leaf() if expr.regex == NOTHING:
            return NOTHING_FITS
        case Rule(name) if name not in productive:
            return NOTHING_FITS
        case Join(items):
            return join(*(_without(i, productive) for i in items))
        case Choice(items):
            return choice(part for part in (_without(i, productive) for i in items) if part != NOTHING_FITS)
        case Many(item, low, high):
            return many(_without(item, productive), low, high)
    return expr


def _reachable(rules: Mapping[str, Expr]) -> list[str]:
    seen: dict[str, None] = {ROOT: None}
    stack = [rules[ROOT]]
    while stack:
        match stack.pop():
            case Rule(name) if name not in seen:
                seen[name] = None
                stack.append(rules[name])
            case Join(items) | Choice(items):
                stack += items
            case Many(item, _, _):
                stack.append(item)
    return list(seen)


def leaves(grammar: Grammar) -> list[Leaf | Native]:
    """Every leaf, in no particular order."""
    found: list[Leaf | Native] = []
    stack: list[Any] = list(grammar.rules.values())
    while stack:
        match stack.pop():
            case Leaf() | Native() as leaf:
                found.append(leaf)
            case Join(items) | Choice(items):
                stack += items
            case Many(item, _, _):
                stack.append(item)
    return found
