"""The keywords of each JSON type, read and checked one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from runtime.errors import InvalidRequest
from runtime.grammar import formats, pointer
from runtime.grammar.dialects import PARAM
from runtime.grammar.nodes import (
    TYPES,
    Anything,
    Array,
    Contains,
    KeyPattern,
    Literal,
    Never,
    Node,
    Number,
    Object,
    Resolve,
    String,
    Union,
    conj,
)
from runtime.grammar.numbers import MAX_BOUND_DIGITS, Bound
from runtime.grammar.regex import RegexError, parse_search
from runtime.grammar.regular import ANY_CHAR, NOTHING, Regex, alt, lengths, lit, none_of, repeat
from runtime.grammar.seen import Seen

NodeOf = Callable[[Any, str], Node]

_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRING = ("minLength", "maxLength", "pattern", "format")
_ARRAY = (
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
)
_OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
)
TYPED = frozenset(_NUMBER + _STRING + _ARRAY + _OBJECT)


def check(condition: bool, where: str, why: str) -> None:
    """Raise InvalidRequest with the pointer unless the condition holds."""
    if not condition:
        raise InvalidRequest(f"JSON schema at '{where or '/'}': {why}.", param=PARAM)


def escape(key: str) -> str:
    """A key as a part of a JSON pointer in a message."""
    return pointer.escape(key)[:80]


def schema_list(value: Any, where: str) -> list[Any]:
    check(isinstance(value, list) and bool(value), where, "must be a non-empty array of schemas")
    return value


def key_set(value: Any, where: str) -> frozenset[str]:
    check(isinstance(value, list) and all(isinstance(v, str) for v in value), where, "must be an array of strings")
    return frozenset(value)


def literal(schema: Mapping[str, Any], keyword: str, where: str) -> Node:
    if keyword == "const":
        return Literal((schema["const"],))
    values = schema["enum"]
    check(isinstance(values, list) and bool(values), f"{where}/enum", "must be a non-empty array")
    return Literal(tuple(values))


def type_names(schema: Mapping[str, Any], where: str) -> list[str] | None:
    """The types named, `integer` dropped beside `number`; None where `type` is absent."""
    if "type" not in schema:
        return None
    value = schema["type"]
    names = value if isinstance(value, list) else [value]
    check(bool(names), f"{where}/type", "must name a type")
    for name in names:
        check(isinstance(name, str) and name in TYPES, f"{where}/type", f"unknown type {str(name)[:40]!r}")
    if schema.get("nullable") is True and "null" not in names:
        names = [*names, "null"]
    return [n for n in dict.fromkeys(names) if n != "integer" or "number" not in names]


def number(schema: Mapping[str, Any], where: str, *, integer: bool) -> Node:
    low = _bound(schema, "minimum", "exclusiveMinimum", where, max)
    high = _bound(schema, "maximum", "exclusiveMaximum", where, min)
    multiples: tuple[Decimal, ...] = ()
    if "multipleOf" in schema:
        step = decimal(schema["multipleOf"], f"{where}/multipleOf")
        check(step > 0, f"{where}/multipleOf", "must be above 0")
        integer, multiples = (True, ()) if step == 1 else (integer, (step,))
    name = schema.get("format")
    bits = formats.INTEGER_BITS.get(name) if isinstance(name, str) else None
    if bits is not None:
        integer = True
        low = _inner(low, Bound(Decimal(-(2 ** (bits - 1)))), max)
        high = _inner(high, Bound(Decimal(2 ** (bits - 1) - 1)), min)
    return Number(integer, low, high, multiples, where=where)


def check_multiples(node: Number, where: str) -> None:
    """Refuse multiples so fine that one beside a strict bound would be parsed as the bound."""
    strict = [bound.value for bound in (node.low, node.high) if bound is not None and bound.strict]
    if not node.multiples or not strict:
        return
    places = max(-int(value.normalize().as_tuple().exponent) for value in (*strict, *node.multiples))
    digits = max(value.adjusted() for value in strict) + 1 + places
    why = "multipleOf beside an exclusive bound, of more than 15 digits together, cannot be enforced"
    check(digits <= 15, where, f"{why}, neither by xgrammar nor by llguidance")


def _bound(schema: Mapping[str, Any], plain: str, strict: str, where: str, pick: Callable[..., Any]) -> Bound | None:
    exclusive = schema.get(strict, False)
    bounds: list[Bound] = []
    if plain in schema:
        value = _end(schema[plain], f"{where}/{plain}", pick)
        bounds.append(Bound(value, exclusive is True))  # draft 4: a flag
    if not isinstance(exclusive, bool):
        bounds.append(Bound(_end(exclusive, f"{where}/{strict}", pick), True))
    result: Bound | None = None
    for bound in bounds:
        result = _inner(result, bound, pick)
    return result


def _end(value: Any, where: str, pick: Callable[..., Any]) -> Decimal:
    """A bound. Where its text is no integer most readers take the nearest double, and compare integers with that."""
    exact = decimal(value, where)
    return exact if isinstance(value, int) or abs(exact) <= 2**53 else pick(exact, Decimal(float(exact)))


def _inner(a: Bound | None, b: Bound, pick: Callable[..., Any]) -> Bound:
    if a is None:
        return b
    if a.value == b.value:
        return a if a.strict else b
    return a if pick(a.value, b.value) == a.value else b


def decimal(value: Any, where: str) -> Decimal:
    """The exact number of a keyword, refused where it has too many digits to make intervals of."""
    ok = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    check(ok, where, "must be a number")
    exact = value if isinstance(value, Decimal) else Decimal(repr(value))
    check(exact.is_finite(), where, "must be a finite number")
    _, digits, exponent = exact.as_tuple()
    significant = "".join(map(str, digits)).rstrip("0")
    if not significant:
        return Decimal(0)  # whatever its exponent
    places = -int(exponent) - (len(digits) - len(significant))
    small = exact.adjusted() < MAX_BOUND_DIGITS and places < MAX_BOUND_DIGITS  # told without writing it out
    check(small, where, f"has more than {MAX_BOUND_DIGITS} digits")
    return exact


def count(schema: Mapping[str, Any], keyword: str, where: str, default: int | None) -> Any:
    if keyword not in schema:
        return default
    value = schema[keyword]
    whole = isinstance(value, (int, Decimal)) and not isinstance(value, bool) and value == int(value) and value >= 0
    check(whole, f"{where}/{keyword}", "must be an integer of at least 0")
    check(value < 2**63, f"{where}/{keyword}", "is out of range")
    return int(value)


def _regex(pattern: Any, where: str) -> Regex:
    check(isinstance(pattern, str), where, "must be a string")
    try:
        return parse_search(pattern)
    except RegexError as error:
        message = f"the regular expression cannot be enforced, neither by xgrammar nor by llguidance: {error}"
        raise InvalidRequest(f"JSON schema at '{where}': {message}.", param=PARAM) from None


def string(schema: Mapping[str, Any], where: str) -> Node:
    low = count(schema, "minLength", where, 0)
    high = count(schema, "maxLength", where, None)
    patterns: list[Regex] = []
    if "pattern" in schema:
        patterns.append(_regex(schema["pattern"], f"{where}/pattern"))
    if "format" in schema:
        patterns += _format(schema["format"], f"{where}/format")
    for regex in patterns:
        shortest, longest = lengths(regex)
        if (high is not None and shortest > high) or (longest is not None and longest < low):
            return Never()
    if high is not None and low > high:
        return Never()
    return String(low, high, tuple(patterns), where=where)


def _format(name: Any, where: str) -> list[Regex]:
    check(isinstance(name, str), where, "must be a string")
    if name in formats.ENFORCED:
        return [formats.regex_of(name)]
    known = name in formats.ANNOTATIONS or name in formats.INTEGER_BITS
    check(known, where, f"format {name[:40]!r} cannot be enforced, neither by xgrammar nor by llguidance")
    return []


def array(schema: Mapping[str, Any], where: str, node_of: NodeOf) -> Node:
    prefix, items = _tuple_and_rest(schema, where, node_of)
    unique = schema.get("uniqueItems", False)
    check(isinstance(unique, bool), f"{where}/uniqueItems", "must be a boolean")
    low, high = count(schema, "minItems", where, 0), count(schema, "maxItems", where, None)
    if high is not None and low > high:
        return Never()
    contains: tuple[Contains, ...] = ()
    if "contains" in schema:
        least, most = count(schema, "minContains", where, 1), count(schema, "maxContains", where, None)
        if least > 0 or most is not None:
            contains = (Contains(node_of(schema["contains"], f"{where}/contains"), least, most),)
    tuple_only = isinstance(schema.get("items"), list) and "additionalItems" not in schema
    every = ("items" in schema and not tuple_only) or schema.get("unevaluatedItems") is True
    seen = Seen(items=len(prefix), all_items=every)
    return Array(tuple(prefix), items, low, high, contains, unique, seen, where=where)


def _tuple_and_rest(schema: Mapping[str, Any], where: str, node_of: NodeOf) -> tuple[list[Node], Node]:
    listed, rest, rest_at = schema.get("prefixItems"), schema.get("items", True), "items"
    if isinstance(rest, list):  # draft 7
        check(listed is None, f"{where}/items", "must not be an array beside prefixItems")
        listed, rest, rest_at = rest, schema.get("additionalItems", True), "additionalItems"
    if listed is None:
        return [], node_of(rest, f"{where}/{rest_at}")
    check(isinstance(listed, list), f"{where}/prefixItems", "must be an array of schemas")
    at = "items" if rest_at == "additionalItems" else "prefixItems"
    return [node_of(s, f"{where}/{at}/{i}") for i, s in enumerate(listed)], node_of(rest, f"{where}/{rest_at}")


def object_(schema: Mapping[str, Any], where: str, node_of: NodeOf, resolve: Resolve) -> Node:
    props = _mapping(schema, "properties", where)
    patterns = _mapping(schema, "patternProperties", where)
    key_patterns = tuple(
        KeyPattern(
            _regex(p, f"{where}/patternProperties/{escape(p)}"), node_of(s, f"{where}/patternProperties/{escape(p)}")
        )
        for p, s in patterns.items()
    )
    nodes = {k: node_of(s, f"{where}/properties/{escape(k)}") for k, s in props.items()}
    additional = schema.get("additionalProperties", None)
    names = (_key_names(schema["propertyNames"], where, node_of, resolve),) if "propertyNames" in schema else ()
    low, high = count(schema, "minProperties", where, 0), count(schema, "maxProperties", where, None)
    if high is not None and low > high:
        return Never()
    return Object(
        props=nodes,
        required=key_set(schema.get("required", []), f"{where}/required")
        if not isinstance(schema.get("required"), bool)
        else frozenset(),
        patterns=key_patterns,
        additional=Anything() if additional is None else node_of(additional, f"{where}/additionalProperties"),
        open=additional is None,
        listed="properties" in schema,
        names=names,
        min_props=low,
        max_props=high,
        seen=Seen(
            frozenset(props),
            frozenset(p.regex for p in key_patterns),
            additional is not None or schema.get("unevaluatedProperties") is True,
        ),
        where=where,
    )


def _mapping(schema: Mapping[str, Any], keyword: str, where: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    check(isinstance(value, dict), f"{where}/{keyword}", "must be an object of schemas")
    return value


def _key_names(schema: Any, where: str, node_of: NodeOf, resolve: Resolve) -> String:
    """`propertyNames` as constraints on a string."""
    at = f"{where}/propertyNames"
    node = conj(String(), node_of(schema, at), resolve)
    parts = node.nodes if isinstance(node, Union) else (node,)
    if isinstance(node, String):
        return node
    return String(patterns=(alt(*(_key_regex(part, at) for part in parts)),))


def _key_regex(node: Node, where: str) -> Regex:
    """One alternative as one expression."""
    match node:
        case Never():
            return NOTHING
        case Literal(values):
            return alt(*(lit(v) for v in values if isinstance(v, str)))
        case String(0, None, (), excluded):
            return none_of(excluded)
        case String(low, high, (), ()):
            return repeat(ANY_CHAR, low, high)
        case String(low, high, (pattern,), ()):
            shortest, longest = lengths(pattern)
            if low <= shortest and (high is None or (longest is not None and longest <= high)):
                return pattern
    check(False, where, "alternatives here cannot be enforced by xgrammar or llguidance")
    return NOTHING
