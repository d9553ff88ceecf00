"""The inside of an array: a tuple, then items, with bounds on how many, which must occur, and no repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from runtime.grammar.nodes import Array, Contains, Literal, Node, TooComplex, item_node, literals
from runtime.grammar.rules import EMPTY_TEXT, NOTHING_FITS, Expr, choice, join, many

MAX_PREFIX = 256
MAX_COUNTED_ITEMS = 64
MAX_UNIQUE_VALUES = 8


class Emitting(Protocol):
    """What turns nodes into expressions."""

    def fresh(self, expr: Expr) -> Expr: ...

    def rule(self, key: str, make: Callable[[], Expr]) -> Expr: ...

    def unique(self, word: str) -> str: ...

    def expr(self, node: Node) -> Expr: ...

    def both(self, a: Node, b: Node) -> Node: ...

    def plain(self, node: Node) -> Node: ...


def array_body(node: Array, comma: Expr, emit: Emitting) -> Expr:
    """What may stand between the brackets."""
    if len(node.prefix) > MAX_PREFIX:
        raise TooComplex(f"more than {MAX_PREFIX} prefixItems")
    if node.unique and (node.max_len is None or node.max_len > 1):
        return _Unique(node, comma, emit).body()
    if node.contains:
        return _Containing(node, comma, emit).body()
    return _plain(node, comma, emit)


def _plain(node: Array, comma: Expr, emit: Emitting) -> Expr:
    n = len(node.prefix)
    if node.max_len is not None and node.max_len < n:
        n = node.max_len
    low, high = max(node.min_len - n, 0), None if node.max_len is None else node.max_len - n
    item = NOTHING_FITS if high == 0 else emit.fresh(emit.expr(node.items))
    tail = _run(item, comma, low, high, started=n > 0)
    for i in reversed(range(n)):
        entry = join(comma if i else EMPTY_TEXT, emit.expr(node.prefix[i]), tail)
        tail = entry if i < node.min_len else _maybe(entry)
    return tail


def _maybe(expr: Expr) -> Expr:
    return many(expr, 0, 1)


def _run(item: Expr, comma: Expr, low: int, high: int | None, *, started: bool) -> Expr:
    """From low to high items; every one after a comma if something stands before them."""
    if started:
        return many(join(comma, item), low, high)
    if high == 0 or item == NOTHING_FITS:
        return NOTHING_FITS if low else EMPTY_TEXT
    first = join(item, many(join(comma, item), max(low - 1, 0), None if high is None else high - 1))
    return first if low else _maybe(first)


class _Containing:
    """One rule for each (items written, items that matched), both counted only as far as they matter."""

    def __init__(self, node: Array, comma: Expr, emit: Emitting) -> None:
        if any(part.high is not None for part in node.contains):
            raise TooComplex("maxContains")
        if len(node.contains) > 1:
            raise TooComplex("contains of several schemas")
        self._node, self._comma, self._emit = node, comma, emit
        self._part: Contains = node.contains[0]
        self._count_to = max(node.min_len, node.max_len or 0, len(node.prefix))
        if self._count_to > MAX_COUNTED_ITEMS or self._part.low > MAX_COUNTED_ITEMS:
            raise TooComplex(f"contains with bounds above {MAX_COUNTED_ITEMS} items")
        self._name = emit.unique("contains")

    def body(self) -> Expr:
        return self._from(0, 0)

    def _from(self, written: int, found: int) -> Expr:
        written, found = min(written, self._count_to + 1), min(found, self._part.low)
        return self._emit.rule(f"{self._name} {written} {found}", lambda: self._make(written, found))

    def _make(self, written: int, found: int) -> Expr:
        node = self._node
        branches: list[Expr] = []
        if written >= node.min_len and found >= self._part.low:
            branches.append(EMPTY_TEXT)
        if node.max_len is None or written < node.max_len:
            separator = self._comma if written else EMPTY_TEXT
            item = item_node(node, written)
            wanted = self._emit.expr(self._emit.both(item, self._part.node))
            if found < self._part.low:
                branches.append(join(separator, wanted, self._from(written + 1, found + 1)))
            branches.append(join(separator, self._emit.expr(item), self._from(written + 1, found)))
        return choice(b for b in branches if b != NOTHING_FITS)


class _Unique:
    """One rule for each set of values already written."""

    def __init__(self, node: Array, comma: Expr, emit: Emitting) -> None:
        items = literals(emit.plain(node.items))
        if node.prefix or node.contains or not isinstance(items, Literal):
            raise TooComplex("uniqueItems of items that are not an enum")
        if len(items.values) > MAX_UNIQUE_VALUES:
            raise TooComplex(f"uniqueItems of an enum with more than {MAX_UNIQUE_VALUES} values")
        self._texts = [emit.expr(Literal((v,))) for v in items.values]
        self._node, self._comma, self._emit = node, comma, emit
        self._name = emit.unique("unique")

    def body(self) -> Expr:
        return self._after(frozenset())

    def _after(self, used: frozenset[int]) -> Expr:
        return self._emit.rule(f"{self._name} {sorted(used)}", lambda: self._make(used))

    def _make(self, used: frozenset[int]) -> Expr:
        branches: list[Expr] = [EMPTY_TEXT] if len(used) >= self._node.min_len else []
        if self._node.max_len is None or len(used) < self._node.max_len:
            separator = self._comma if used else EMPTY_TEXT
            for i, text in enumerate(self._texts):
                if i not in used:
                    branches.append(join(separator, text, self._after(used | {i})))
        return choice(branches)
