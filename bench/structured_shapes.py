"""The schemas and prompts of the structured output benchmark."""

from __future__ import annotations

from typing import Any

STR, INT, BOOL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 12}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 9999}


def record(**props: Any) -> dict[str, Any]:
    return {"type": "object", "properties": props, "required": list(props), "additionalProperties": False}


def numbered(n: int, value: Any) -> dict[str, Any]:
    return record(**{f"field_{i}": value for i in range(n)})


def tools(n: int) -> dict[str, Any]:
    """A required call of one of n tools."""
    calls = [record(name={"const": f"tool_{i}"}, arguments=record(city=SHORT, days=DIGITS)) for i in range(n)]
    return {"anyOf": calls}


TREE = {
    "$defs": {"node": record(value=DIGITS, left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    "$ref": "#/$defs/node",
}
SHAPES: dict[str, dict[str, Any]] = {
    "flat3": record(name=SHORT, population=DIGITS, is_capital=BOOL),
    "flat5 keys": record(first_name=SHORT, last_name=SHORT, email_address=SHORT, phone_number=DIGITS, is_active=BOOL),
    "flat20": numbered(20, BOOL),
    "flat200": numbered(200, {"enum": [0, 1]}),
    "nested": record(user=record(name=SHORT, address=record(city=SHORT, zip=DIGITS)), ok=BOOL),
    "enums": record(**{k: {"enum": ["small", "medium", "large"]} for k in ("size", "speed", "quality", "price")}),
    "array": record(items={"type": "array", "items": DIGITS, "minItems": 12, "maxItems": 12}),
    "recursive": TREE,
    "long string": record(summary={"type": "string", "minLength": 120, "maxLength": 160}),
    "free string": record(title=STR, summary=STR),
    "tool of 1": tools(1),
    "tool of 30": tools(30),
}
CITIES = ["Paris", "Rome", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Quito"]


def prompts(n: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"({i}) Describe {CITIES[i % 8]} as JSON."}] for i in range(n)]
