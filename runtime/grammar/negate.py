"""Complements of schemas, for `not`, `if` and overlapping `oneOf`.

The result may be smaller than the true complement (never larger), so what a grammar makes of it stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from itertools import pairwise
from typing import Any, NoReturn

from runtime.errors import InvalidRequest
from runtime.grammar import keywords as kw
from runtime.grammar.dialects import PARAM
from runtime.grammar.nodes import (
    TYPES,
    Anything,
    Array,
    Literal,
    Never,
    Node,
    Number,
    Object,
    String,
    conj_all,
    union,
)
from runtime.grammar.numbers import Bound

_SILENT = frozenset({"title", "description", "default", "examples", "$comment", "$defs", "definitions", "$schema"})


class Negator:
    """Negates raw schemas of one document. `node_of` normalises, `lookup` follows a reference, `pointer` places it,
    `read` leaves out what says nothing in a schema's draft."""

    def __init__(
        self,
        node_of: Callable[[Any, str], Node],
        lookup: Callable[[str, str], Any],
        pointer: Callable[[str, str], str],
        read: Callable[[Any, str], Any],
    ) -> None:
        self._node_of = node_of
        self._lookup = lookup
        self._pointer = pointer
        self._read = read
        self._depth = 0

    def negate(self, schema: Any, where: str) -> Node:
        """Values that are not valid. Raises InvalidRequest for keywords that have no usable complement."""
        if isinstance(schema, bool):
            return Never() if schema else Anything()
        kw.check(isinstance(schema, dict), where, "a schema must be an object or a boolean")
        self._node_of(schema, where)  # malformed keywords are reported as such
        schema = self._read(schema, where)
        self._depth += 1
        kw.check(self._depth <= 32, where, "negations nested this deep cannot be enforced")
        try:
            return union(self._keyword(key, schema, where) for key in schema if key not in _SILENT and key[:2] != "x-")
        finally:
            self._depth -= 1

    def _keyword(self, key: str, schema: Mapping[str, Any], where: str) -> Node:
        value, at = schema[key], f"{where}/{key}"
        match key:
            case "type":
                return union(_other_types(kw.type_names(schema, where) or []))
            case "enum" | "const":
                return union(_other_values(value if key == "enum" else [value], at))
            case "required":
                return union(Object(props={k: Never()}) for k in value)
            case "properties":
                return union(self._property(k, s, f"{at}/{kw.escape(k)}") for k, s in value.items())
            case "minLength":
                return String(max_len=n - 1) if (n := kw.count(schema, key, where, 0)) else Never()
            case "maxLength":
                return String(min_len=kw.count(schema, key, where, 0) + 1)
            case "minItems":
                return Array(max_len=n - 1) if (n := kw.count(schema, key, where, 0)) else Never()
            case "maxItems":
                return Array(min_len=kw.count(schema, key, where, 0) + 1)
            case "minimum" | "exclusiveMinimum" if not isinstance(value, bool):
                return Number(high=Bound(kw.decimal(value, at), key == "minimum"), where=where)
            case "maximum" | "exclusiveMaximum" if not isinstance(value, bool):
                return Number(low=Bound(kw.decimal(value, at), key == "maximum"), where=where)
            case "not":
                return self._node_of(value, at)
            case "anyOf":
                return conj_all((self.negate(s, f"{at}/{i}") for i, s in enumerate(value)), _no_definitions)
            case "allOf":
                return union(self.negate(s, f"{at}/{i}") for i, s in enumerate(value))
            case "$ref":
                return self.negate(self._lookup(value, at), self._pointer(value, at))
            case "additionalProperties" | "unevaluatedProperties":
                return Never()  # values that fail only here are left out: a smaller complement
        return _cannot(at, f"the negation of {key}")

    def _property(self, key: str, schema: Any, where: str) -> Node:
        wrong = self.negate(schema, where)
        return Never() if isinstance(wrong, Never) else Object(props={key: wrong}, required=frozenset({key}))


def _cannot(where: str, what: str) -> NoReturn:
    message = f"JSON schema at '{where}': {what} cannot be enforced, neither by xgrammar nor by llguidance."
    raise InvalidRequest(message, param=PARAM)


def _no_definitions(name: str) -> Node:
    raise InvalidRequest(f"JSON schema: the negated reference '{name}' cannot be enforced.", param=PARAM)


def _other_types(names: Iterable[str]) -> list[Node]:
    taken = {"number" if n == "integer" else n for n in names}
    return [node for name, node in TYPES.items() if name != "integer" and name not in taken]


def _other_values(values: list[Any], where: str) -> list[Node]:
    """Every value but these. Numbers become the gaps between them; arrays and objects are left out beside some."""
    keep: list[Node] = []
    simple = [v for v in (None, True, False) if not any(v is w for w in values)]
    if simple:
        keep.append(Literal(tuple(simple)))
    keep.append(String(excluded=tuple(v for v in values if isinstance(v, str))))
    numbers = sorted(
        {kw.decimal(v, where) for v in values if isinstance(v, (int, Decimal)) and not isinstance(v, bool)}
    )
    ends = [None, *(Bound(n, strict=True) for n in numbers), None]
    keep += [Number(low=low, high=high) for low, high in pairwise(ends)]
    for kind, node in ((list, Array()), (dict, Object())):
        if not any(isinstance(v, kind) for v in values):
            keep.append(node)
    return keep
