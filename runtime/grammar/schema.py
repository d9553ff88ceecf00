"""JSON Schema to normal form. What cannot be enforced exactly is refused with the JSON pointer of its keyword.

Drafts 4 to 2020-12 as far as they speak of values a grammar can hold; where `$schema` declares one, that one alone.
Keywords without a meaning for validity (titles, defaults, `x-...`, unknown words) are ignored, as the standard says.
Where no draft is declared `nullable` is read as OpenAPI means it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, NoReturn
from urllib.parse import unquote

from runtime.errors import InvalidRequest
from runtime.grammar import keywords as kw
from runtime.grammar.dialects import PARAM, Dialects
from runtime.grammar.disjoint import disjoint
from runtime.grammar.locate import keyword_place
from runtime.grammar.negate import Negator
from runtime.grammar.nodes import (
    EVERY_TYPE,
    TYPES,
    Anything,
    Literal,
    Never,
    Node,
    Number,
    Object,
    Ref,
    TooComplex,
    Union,
    conj,
    conj_all,
    union,
)
from runtime.grammar.pointer import escape, lookup
from runtime.grammar.unevaluated import close_items, close_keys, unseen

_NOTHING = object()
_REFUSED = {
    "$dynamicRef": "dynamic references",
    "$recursiveRef": "dynamic references",
    "contentSchema": "schemas of encoded content",
}


def refuse(where: str, why: str) -> NoReturn:
    raise InvalidRequest(f"JSON schema at '{where or '/'}': {why}", param=PARAM)


def cannot(where: str, what: str) -> NoReturn:
    refuse(where, f"{what} cannot be enforced, neither by xgrammar nor by llguidance.")


class Normaliser:
    """One schema document. `root` is its normal form, `resolve(name)` that of a definition."""

    def __init__(self, document: Any) -> None:
        self.document = document
        self._done: dict[str, Node] = {}
        self._open: set[str] = set()
        self._dialects = Dialects(document)
        self._negator = Negator(self.node, self.lookup, self.pointer, self._dialects.read)

    def root(self) -> Node:
        return self.resolve("#")

    def resolve(self, name: str) -> Node:
        """The normal form of what a reference names."""
        if name in self._done:
            return self._done[name]
        if name in self._open:
            refuse(name.lstrip("#"), "the reference leads back to itself without a value in between.")
        self._open.add(name)
        try:
            node = self.node(self.lookup(name, name), self.pointer(name, name))
            if isinstance(node, Ref):
                node = self.resolve(node.name)
        finally:
            self._open.discard(name)
        self._done[name] = node
        return node

    def lookup(self, name: str, where: str) -> Any:
        """The raw schema of a reference into this document."""
        pointer = self.pointer(name, where)
        place = lookup(self.document, pointer, _NOTHING)
        if place is _NOTHING:
            refuse(where, f"the reference '{name}' points at nothing.")
        return place

    def pointer(self, name: str, where: str) -> str:
        """The JSON pointer of what a reference into this document names."""
        if not name.startswith("#"):
            cannot(where, f"the reference '{name}' to another document")
        fragment = unquote(name[1:])
        return self._anchor(fragment, where) if fragment and not fragment.startswith("/") else fragment

    def _anchor(self, fragment: str, where: str) -> str:
        stack = [("", self.document)]
        while stack:
            at, place = stack.pop()
            if isinstance(place, dict):
                if self._dialects.of(place).anchors(place, fragment):
                    return at
                stack += ((f"{at}/{escape(key)}", part) for key, part in place.items())
            elif isinstance(place, list):
                stack += ((f"{at}/{i}", part) for i, part in enumerate(place))
        return refuse(where, f"the anchor '#{fragment}' is not defined.")

    def node(self, schema: Any, where: str) -> Node:
        """The normal form of one schema. Raises InvalidRequest."""
        if isinstance(schema, bool):
            return Anything() if schema else Never()
        if not isinstance(schema, dict):
            refuse(where, "a schema must be an object or a boolean.")
        dialect = self._dialects.of(schema)
        said = dialect.read(schema, where)
        for keyword, what in _REFUSED.items():
            if keyword in said:
                cannot(f"{where}/{keyword}", what)
        if where and dialect.is_document(schema):
            cannot(f"{where}/{dialect.identity}", "a schema document inside another")
        try:
            return self._merge(said, where)
        except TooComplex as error:
            refuse(keyword_place(self.document, where, str(error)), f"{error}.")

    def _merge(self, schema: Mapping[str, Any], where: str) -> Node:
        parts: list[Node] = []
        if "$ref" in schema:
            parts.append(self._reference(schema["$ref"], f"{where}/$ref"))
        parts.append(self._typed(schema, where))
        for keyword in ("enum", "const"):
            if keyword in schema:
                parts.append(kw.literal(schema, keyword, where))
        for keyword, combine in _COMBINATORS.items():
            if keyword in schema:
                parts.append(combine(self, schema[keyword], f"{where}/{keyword}"))
        if "if" in schema:
            parts.append(self._conditional(schema, where))
        node = conj_all(parts, self.resolve)
        for part in node.nodes if isinstance(node, Union) else (node,):
            if isinstance(part, Number):
                kw.check_multiples(part, f"{where}/multipleOf")
        if "oneOf" in schema:
            node = self._one_of(schema["oneOf"], node, f"{where}/oneOf")
        return self._close(node, schema, where)

    def _reference(self, name: Any, where: str) -> Node:
        if not isinstance(name, str):
            refuse(where, "a reference must be a string.")
        self.lookup(name, where)
        return Ref(name)

    def _typed(self, schema: Mapping[str, Any], where: str) -> Node:
        """The union over the allowed types, each with its keywords."""
        names = kw.type_names(schema, where)
        if names is None:
            if not kw.TYPED.intersection(schema):
                return Anything()
            names = ["null", "boolean", "number", "string", "array", "object"]
        return union(self._of_type(name, schema, where) for name in names)

    def _of_type(self, name: str, schema: Mapping[str, Any], where: str) -> Node:
        match name:
            case "integer" | "number":
                return kw.number(schema, where, integer=name == "integer")
            case "string":
                return kw.string(schema, where)
            case "array":
                return kw.array(schema, where, self.node)
            case "object":
                return kw.object_(schema, where, self.node, self.resolve)
        return TYPES[name]

    def _all_of(self, value: Any, where: str) -> Node:
        return conj_all(self._branches(value, where), self.resolve)

    def _any_of(self, value: Any, where: str) -> Node:
        return union(self._branches(value, where))

    def _branches(self, value: Any, where: str) -> list[Node]:
        return [self.node(s, f"{where}/{i}") for i, s in enumerate(kw.schema_list(value, where))]

    def _not(self, value: Any, where: str) -> Node:
        return self._without(value, where)

    def _without(self, schema: Any, where: str) -> Node:
        """The complement, which says nothing of evaluated keys and items."""
        return unseen(self._negator.negate(schema, where), self.resolve)

    def _one_of(self, value: Any, base: Node, where: str) -> Node:
        """Exactly one: a plain union where no value fits two branches, else each branch without the others."""
        branches = [conj(base, branch, self.resolve) for branch in self._branches(value, where)]
        if all(disjoint(a, b, self.resolve) for a, b in combinations(branches, 2)):
            return union(branches)
        closed = [self._closed(branch) for branch in branches]
        if all(disjoint(a, b, self.resolve) for (a, _), (_, b) in permutations(zip(branches, closed, strict=True), 2)):
            return union(closed)
        alone: list[Node] = []
        for i, branch in enumerate(branches):
            others = [self._without(s, f"{where}/{j}") for j, s in enumerate(value) if j != i]
            alone.append(conj_all([branch, *others], self.resolve))
        return union(alone)

    def _conditional(self, schema: Mapping[str, Any], where: str) -> Node:
        condition = self.node(schema["if"], f"{where}/if")
        branches: list[Node] = []
        if schema.get("then", True) is not False:
            branches.append(conj(condition, self.node(schema.get("then", True), f"{where}/then"), self.resolve))
        otherwise = self._without(schema["if"], f"{where}/if")
        branches.append(conj(otherwise, self.node(schema.get("else", True), f"{where}/else"), self.resolve))
        return union(branches)

    def _dependencies(self, value: Any, where: str) -> Node:
        """Draft 7: a list of keys or a schema for each key."""
        kw.check(isinstance(value, dict), where, "must be an object")
        lists = {k: v for k, v in value.items() if isinstance(v, list)}
        schemas = {k: v for k, v in value.items() if not isinstance(v, list)}
        needs = unseen(self._dependent_schemas(schemas, where), self.resolve)  # no keyword where annotations are
        return conj(self._dependent_required(lists, where), needs, self.resolve)

    def _dependent_required(self, value: Any, where: str) -> Node:
        kw.check(isinstance(value, dict), where, "must be an object")
        needs = {k: Object(required=kw.key_set(v, f"{where}/{kw.escape(k)}")) for k, v in value.items()}
        return self._dependent(needs)

    def _dependent_schemas(self, value: Any, where: str) -> Node:
        kw.check(isinstance(value, dict), where, "must be an object")
        return self._dependent({k: self.node(v, f"{where}/{kw.escape(k)}") for k, v in value.items()})

    def _dependent(self, needs: Mapping[str, Node]) -> Node:
        """Objects without the key, or with it and what it needs."""
        others = [t for t in EVERY_TYPE if not isinstance(t, Object)]
        result: Node = Anything()
        for key, node in needs.items():
            absent, present = Object(props={key: Never()}), Object(required=frozenset({key}))
            result = conj(result, union([absent, conj(present, node, self.resolve), *others]), self.resolve)
        return result

    def _close(self, node: Node, schema: Mapping[str, Any], where: str) -> Node:
        """`unevaluatedProperties: false` and `unevaluatedItems: false`, now that siblings are merged."""
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            value = schema.get(keyword, True)
            if value is not True and value is not False:
                cannot(f"{where}/{keyword}", f"{keyword} with a schema")
            if value is False:
                close = close_keys if keyword == "unevaluatedProperties" else close_items
                try:
                    node = close(node, self.resolve)
                except TooComplex as error:
                    cannot(f"{where}/{keyword}", f"{keyword} beside {error}")
        return node

    def _closed(self, node: Node) -> Node:
        """Objects that list keys and say nothing of others take no others."""
        match node:
            case Ref(name):
                return self._closed(self.resolve(name))
            case Union(nodes):
                return union(self._closed(n) for n in nodes)
            case Object(open=True) if node.listed or node.patterns:
                return replace(node, additional=Never(), open=False)
        return node


_COMBINATORS: dict[str, Callable[[Normaliser, Any, str], Node]] = {
    "allOf": Normaliser._all_of,
    "anyOf": Normaliser._any_of,
    "not": Normaliser._not,
    "dependencies": Normaliser._dependencies,
    "dependentRequired": Normaliser._dependent_required,
    "dependentSchemas": Normaliser._dependent_schemas,
}


def implied(node: Node) -> Node:
    """Drop the types a schema without `type` leaves wholly free: `{"properties": ...}` is meant to be an object."""
    if not isinstance(node, Union):
        return node
    free = [n for n in node.nodes if n in EVERY_TYPE]
    kept = [n for n in node.nodes if n not in EVERY_TYPE]
    typed = {type(n) for n in kept if not isinstance(n, Literal)}
    missing = {type(t) for t in EVERY_TYPE if t not in free and not isinstance(t, Literal)}
    return union(kept) if len(free) >= len(EVERY_TYPE) - 1 and typed and typed == missing else node
