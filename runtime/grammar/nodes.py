"""JSON Schema in normal form: every node constrains one type, and siblings have been merged into it.

`conj` is the intersection of two nodes, `union` their union; both are exact. `Ref` names a definition that is
normalised when first needed, so schemas may be recursive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from runtime.grammar.numbers import Bound
from runtime.grammar.regular import Regex, fullmatch
from runtime.grammar.seen import UNSEEN, Seen
from runtime.grammar.work import step

MAX_ALTERNATIVES = 512
MAX_MERGE_DEPTH = 64


class TooComplex(ValueError):
    """The schema multiplies out beyond the limits; the message says where it grew."""


@dataclass(frozen=True, slots=True)
class Anything:
    """Every JSON value."""


@dataclass(frozen=True, slots=True)
class Never:
    """No value."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """One of some values (null and booleans are literals too)."""

    values: tuple[Any, ...]
    seen: Seen = UNSEEN

    def _key(self) -> Hashable:
        return tuple(map(value_key, self.values)), self.seen

    def __eq__(self, other: object) -> bool:  # to Python 1 equals true
        return isinstance(other, Literal) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Number:
    integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Decimal, ...] = ()
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class String:
    """Lengths in characters; every one of `patterns` matches the whole text; none of `excluded` is the text."""

    min_len: int = 0
    max_len: int | None = None
    patterns: tuple[Regex, ...] = ()
    excluded: tuple[str, ...] = ()
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Contains:
    """At least `low` and at most `high` items match `node`."""

    node: Node
    low: int = 1
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Array:
    prefix: tuple[Node, ...] = ()
    items: Node = Anything()
    min_len: int = 0
    max_len: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False
    seen: Seen = UNSEEN
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """Keys that the regular expression matches hold a `node`."""

    regex: Regex
    node: Node


@dataclass(frozen=True, slots=True)
class Object:
    """`open`: nothing was said of other keys; `additional` is then Anything. `listed`: keys were listed, maybe none."""

    props: dict[str, Node] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    patterns: tuple[KeyPattern, ...] = ()
    additional: Node = Anything()
    open: bool = True
    listed: bool = False
    names: tuple[String, ...] = ()
    min_props: int = 0
    max_props: int | None = None
    seen: Seen = UNSEEN
    where: str = field(default="", compare=False)

    def key_nodes(self, key: str) -> list[Node]:
        """What the value of `key` must match, all of it."""
        nodes = [self.props[key]] if key in self.props else []
        nodes += [p.node for p in self.patterns if fullmatch(p.regex, key)]
        if key not in self.props and not nodes:
            nodes = [self.additional]
        if any(not string_matches(name, key) for name in self.names):
            nodes.append(Never())
        return nodes


@dataclass(frozen=True, slots=True)
class Union:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


Node = Anything | Never | Literal | Number | String | Array | Object | Union | Ref
Resolve = Callable[[str], Node]

NULL = Literal((None,))
BOOLEAN = Literal((True, False))
TYPES: dict[str, Node] = {
    "null": NULL,
    "boolean": BOOLEAN,
    "integer": Number(integer=True),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}
EVERY_TYPE: tuple[Node, ...] = tuple(node for name, node in TYPES.items() if name != "integer")


def value_key(value: Any) -> Hashable:
    """Equal for values that JSON Schema calls equal (1 and 1.0 are, 1 and true are not)."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return (type(value).__name__, value)
    if isinstance(value, (int, float, Decimal)):
        return ("number", Decimal(value) if not isinstance(value, float) else Decimal(repr(value)))
    if isinstance(value, list):
        return ("array", tuple(value_key(v) for v in value))
    return ("object", frozenset((k, value_key(v)) for k, v in value.items()))


def json_text(value: Any, comma: str, colon: str) -> str:
    """The one spelling in which a literal value is written."""
    if isinstance(value, Decimal):
        return str(int(value)) if value == value.to_integral_value() and abs(value) < 10**20 else str(value)
    if isinstance(value, list):
        return "[" + comma.join(json_text(v, comma, colon) for v in value) + "]"
    if isinstance(value, dict):
        pairs = (json_text(k, comma, colon) + colon + json_text(v, comma, colon) for k, v in value.items())
        return "{" + comma.join(pairs) + "}"
    return json.dumps(value, ensure_ascii=False)


def union(nodes: Iterable[Node]) -> Node:
    """The union, flattened, without doubles."""
    flat: list[Node] = []
    for node in nodes:
        for part in node.nodes if isinstance(node, Union) else (node,):
            if isinstance(part, Anything):
                return part
            step(1 + len(flat) // 8)
            if not isinstance(part, Never) and part not in flat:
                flat.append(part)
                if len(flat) > MAX_ALTERNATIVES:  # told before the rest is worked out
                    raise TooComplex(f"it multiplies out to more than {MAX_ALTERNATIVES} alternatives")
    if not flat:
        return Never()
    return flat[0] if len(flat) == 1 else Union(tuple(flat))


def literals(node: Node) -> Node:
    """Alternatives that are all literals as one, each value once; what is not, as it is."""
    nodes = node.nodes if isinstance(node, Union) else () if isinstance(node, Never) else (node,)
    if not all(isinstance(n, Literal) for n in nodes):
        return node
    return Literal(tuple({value_key(v): v for n in nodes if isinstance(n, Literal) for v in n.values}.values()))


def conj(a: Node, b: Node, resolve: Resolve, depth: int = 0) -> Node:
    """The intersection. Raises TooComplex where it does not end (two recursive definitions at once)."""
    step()
    if depth > MAX_MERGE_DEPTH:
        raise TooComplex("it merges a recursive definition with another schema without end")
    match a, b:
        case (Never(), _) | (_, Anything()):
            return a
        case (_, Never()) | (Anything(), _):
            return b
        case Ref(), Ref() if a == b:
            return a
        case Ref(name), _:
            return conj(resolve(name), b, resolve, depth + 1)
        case _, Ref(name):
            return conj(a, resolve(name), resolve, depth + 1)
        case Union(nodes), _:
            return union(conj(n, b, resolve, depth + 1) for n in nodes)
        case _, Union(nodes):
            return union(conj(a, n, resolve, depth + 1) for n in nodes)
        case Literal(), _:
            return _keep(a, b, resolve)
        case _, Literal():
            return _keep(b, a, resolve)
        case Number(), Number():
            return _conj_numbers(a, b)
        case String(), String():
            return _conj_strings(a, b)
        case Array(), Array():
            return _conj_arrays(a, b, resolve, depth + 1)
        case Object(), Object():
            return _conj_objects(a, b, resolve, depth + 1)
    return Never()


def conj_all(nodes: Iterable[Node], resolve: Resolve, depth: int = 0) -> Node:
    result: Node = Anything()
    for node in nodes:
        result = conj(result, node, resolve, depth)
    return result


def _keep(literal: Literal, node: Node, resolve: Resolve) -> Node:
    kept = tuple(v for v in literal.values if matches(node, v, resolve))
    seen = literal.seen | node.seen if isinstance(node, (Literal, Array, Object)) else literal.seen
    return Literal(kept, seen) if kept else Never()


def _conj_numbers(a: Number, b: Number) -> Number:
    return Number(
        integer=a.integer or b.integer,
        low=_tighter(a.low, b.low, max),
        high=_tighter(a.high, b.high, min),
        multiples=tuple(dict.fromkeys(a.multiples + b.multiples)),
        where=a.where or b.where,
    )


def _tighter(a: Bound | None, b: Bound | None, pick: Callable[..., Decimal]) -> Bound | None:
    if a is None or b is None:
        return a or b
    if a.value == b.value:
        return Bound(a.value, a.strict or b.strict)
    return a if pick(a.value, b.value) == a.value else b


def _conj_strings(a: String, b: String) -> Node:
    high = _least(a.max_len, b.max_len)
    low = max(a.min_len, b.min_len)
    if high is not None and low > high:
        return Never()
    patterns = tuple(dict.fromkeys(a.patterns + b.patterns))
    return String(low, high, patterns, tuple(dict.fromkeys(a.excluded + b.excluded)), where=a.where or b.where)


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return a if b is None else b
    return min(a, b)


def item_node(array: Array, index: int) -> Node:
    return array.prefix[index] if index < len(array.prefix) else array.items


def _conj_arrays(a: Array, b: Array, resolve: Resolve, depth: int) -> Node:
    n = max(len(a.prefix), len(b.prefix))
    return Array(
        prefix=tuple(conj(item_node(a, i), item_node(b, i), resolve, depth) for i in range(n)),
        items=conj(a.items, b.items, resolve, depth),
        min_len=max(a.min_len, b.min_len),
        max_len=_least(a.max_len, b.max_len),
        contains=a.contains + b.contains,
        unique=a.unique or b.unique,
        seen=a.seen | b.seen,
        where=a.where or b.where,
    )


def _conj_objects(a: Object, b: Object, resolve: Resolve, depth: int) -> Node:
    props = {key: conj_all(a.key_nodes(key) + b.key_nodes(key), resolve, depth) for key in {**a.props, **b.props}}
    return Object(
        props=props,
        required=a.required | b.required,
        patterns=_conj_patterns(a, b, resolve, depth),
        additional=conj(a.additional, b.additional, resolve, depth),
        open=a.open and b.open,
        listed=a.listed or b.listed,
        names=a.names + b.names,
        min_props=max(a.min_props, b.min_props),
        max_props=_least(a.max_props, b.max_props),
        seen=a.seen | b.seen,
        where=a.where or b.where,
    )


def _conj_patterns(a: Object, b: Object, resolve: Resolve, depth: int) -> tuple[KeyPattern, ...]:
    """A key under one side's pattern is an additional key to the other, unless a pattern there takes it too."""
    if a.patterns and b.patterns and not (isinstance(a.additional, Anything) and isinstance(b.additional, Anything)):
        if {p.regex for p in a.patterns} != {p.regex for p in b.patterns}:
            raise TooComplex("it merges different patternProperties beside additionalProperties")
        return _by_regex(a.patterns + b.patterns, resolve, depth)
    ours = tuple(replace(p, node=conj(p.node, b.additional, resolve, depth)) for p in a.patterns)
    theirs = tuple(replace(p, node=conj(p.node, a.additional, resolve, depth)) for p in b.patterns)
    return _by_regex(ours + theirs, resolve, depth)


def _by_regex(patterns: tuple[KeyPattern, ...], resolve: Resolve, depth: int) -> tuple[KeyPattern, ...]:
    """One entry for each expression."""
    nodes: dict[Regex, list[Node]] = {}
    for pattern in patterns:
        nodes.setdefault(pattern.regex, []).append(pattern.node)
    return tuple(KeyPattern(regex, conj_all(parts, resolve, depth)) for regex, parts in nodes.items())


def string_matches(node: String, text: str) -> bool:
    return (
        node.min_len <= len(text)
        and (node.max_len is None or len(text) <= node.max_len)
        and text not in node.excluded
        and all(fullmatch(p, text) for p in node.patterns)
    )


def matches(node: Node, value: Any, resolve: Resolve) -> bool:
    """Whether a JSON value is valid."""
    step()
    match node:
        case Anything():
            return True
        case Literal(values):
            return value_key(value) in {value_key(v) for v in values}
        case Number():
            return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and _in_number(node, value)
        case String():
            return isinstance(value, str) and string_matches(node, value)
        case Array():
            return isinstance(value, list) and _in_array(node, value, resolve)
        case Object():
            return isinstance(value, dict) and _in_object(node, value, resolve)
        case Union(nodes):
            return any(matches(n, value, resolve) for n in nodes)
        case Ref(name):
            return matches(resolve(name), value, resolve)
    return False


def _in_number(node: Number, value: int | float | Decimal) -> bool:
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    low, high = node.low, node.high
    if low is not None and (exact < low.value or (low.strict and exact == low.value)):
        return False
    if high is not None and (exact > high.value or (high.strict and exact == high.value)):
        return False
    whole = not node.integer or exact == exact.to_integral_value()
    return whole and all(Fraction(exact) % Fraction(m) == 0 for m in node.multiples)


def _in_array(node: Array, value: list[Any], resolve: Resolve) -> bool:
    if len(value) < node.min_len or (node.max_len is not None and len(value) > node.max_len):
        return False
    if node.unique and len({value_key(v) for v in value}) < len(value):
        return False
    for part in node.contains:
        count = sum(matches(part.node, v, resolve) for v in value)
        if count < part.low or (part.high is not None and count > part.high):
            return False
    return all(matches(item_node(node, i), v, resolve) for i, v in enumerate(value))


def _in_object(node: Object, value: dict[str, Any], resolve: Resolve) -> bool:
    if len(value) < node.min_props or (node.max_props is not None and len(value) > node.max_props):
        return False
    return node.required <= value.keys() and all(
        matches(n, v, resolve) for key, v in value.items() for n in node.key_nodes(key)
    )
