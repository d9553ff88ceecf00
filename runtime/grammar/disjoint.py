"""Whether two nodes provably have no value in common. False where it is not known."""

from __future__ import annotations

from typing import Any

from runtime.grammar.nodes import (
    Array,
    Literal,
    Never,
    Node,
    Number,
    Object,
    Ref,
    Resolve,
    String,
    Union,
    conj_all,
    matches,
)
from runtime.grammar.numbers import numbers
from runtime.grammar.regular import NOTHING, lengths
from runtime.grammar.work import step

_MAX_DEPTH = 16


def disjoint(a: Node, b: Node, resolve: Resolve, depth: int = 0) -> bool:
    """True if no value matches both."""
    step()
    if depth > _MAX_DEPTH:
        return False
    match a, b:
        case (Never(), _) | (_, Never()):
            return True
        case Ref(), Ref() if a == b:
            return False
        case Ref(name), _:
            return disjoint(resolve(name), b, resolve, depth + 1)
        case _, Ref(name):
            return disjoint(a, resolve(name), resolve, depth + 1)
        case Union(nodes), _:
            return all(disjoint(n, b, resolve, depth + 1) for n in nodes)
        case _, Union(nodes):
            return all(disjoint(a, n, resolve, depth + 1) for n in nodes)
        case Literal(values), _:
            return not _any_matches(values, b, resolve)
        case _, Literal(values):
            return not _any_matches(values, a, resolve)
        case Number(), Number():
            return _numbers_apart(a, b)
        case String(), String():
            return _strings_apart(a, b)
        case Array(), Array():
            return _lengths_apart(a.min_len, a.max_len, b.min_len, b.max_len)
        case Object(), Object():
            return _objects_apart(a, b, resolve, depth)
    return type(a) is not type(b) and not _free(a) and not _free(b)


def _free(node: Node) -> bool:
    return not isinstance(node, (Number, String, Array, Object))


def _any_matches(values: tuple[Any, ...], node: Node, resolve: Resolve) -> bool:
    return any(matches(node, v, resolve) for v in values)


def _numbers_apart(a: Number, b: Number) -> bool:
    lows = [n.low for n in (a, b) if n.low is not None]
    highs = [n.high for n in (a, b) if n.high is not None]
    return any(numbers(low, high) == NOTHING for low in lows for high in highs)


def _strings_apart(a: String, b: String) -> bool:
    return _lengths_apart(*_string_lengths(a), *_string_lengths(b))


def _string_lengths(node: String) -> tuple[int, int | None]:
    low, high = node.min_len, node.max_len
    for least, most in (lengths(p) for p in node.patterns):
        low = max(low, least)
        high = most if high is None else high if most is None else min(high, most)
    return low, high


def _lengths_apart(low_a: int, high_a: int | None, low_b: int, high_b: int | None) -> bool:
    return (high_a is not None and high_a < low_b) or (high_b is not None and high_b < low_a)


def _objects_apart(a: Object, b: Object, resolve: Resolve, depth: int) -> bool:
    for key in a.required | b.required:
        in_a = conj_all(a.key_nodes(key), resolve)
        in_b = conj_all(b.key_nodes(key), resolve)
        if disjoint(in_a, in_b, resolve, depth + 1):
            return True
    return False
