"""From Python types to grammars and back: what an answer must match, and how its text becomes a value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from frontend_lang.errors import InvalidChoices, InvalidSchema, check_text
from runtime.messages import GrammarSpec

INT = r" ?-?(0|[1-9][0-9]{0,8})"
FLOAT = r" ?-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?"
BOOL = ("true", "false")


@dataclass(frozen=True, slots=True)
class Typed:
    """How one kind of answer is constrained and read. `parse` raises ValueError for text that is no such value."""

    kind: str
    grammar: GrammarSpec | None
    parse: Callable[[str], Any]


def of_type(kind: Any, label: str = "type") -> Typed:
    """A type (str, int, float, bool, Literal, Enum, dataclass, pydantic model, list[...], TypedDict ...), given as the
    parameter `label`."""
    if kind is str:
        return Typed("text", None, str)
    if kind is int:
        return Typed("int", _grammar("regex", INT), lambda text: int(text.strip()))
    if kind is float:
        return Typed("float", _grammar("regex", FLOAT), lambda text: float(text.strip()))
    if kind is bool:
        return Typed("bool", _grammar("choices", json.dumps(BOOL)), _parse_bool)
    if get_origin(kind) is Literal:
        return _of_literal(get_args(kind))
    return _of_adapter(kind, label)


def of_regex(pattern: str) -> Typed:
    """A regular expression that the whole answer must match."""
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidSchema(f"regex={pattern!r} is no regular expression: {error}.") from error

    def parse(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise ValueError(f"{text!r} does not match {pattern!r}")
        return text

    return Typed("regex", _grammar("regex", pattern), parse)


def of_json_schema(schema: Mapping[str, Any] | str) -> Typed:
    """A JSON schema (mapping, or its text); the value is the parsed JSON."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed)
    except (TypeError, ValueError) as error:
        raise InvalidSchema(f"json_schema is not a JSON object: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidSchema(f"json_schema must be a JSON object; got {type(parsed).__name__}.")
    return Typed("json", _grammar("json_schema", text), json.loads)


def of_choices(choices: Any) -> Typed:
    """Exactly one of some strings."""
    options = check_choices(choices)

    def parse(text: str) -> str:
        if text not in options:
            raise ValueError(f"{text!r} is none of the choices")
        return text

    return Typed("choices", _grammar("choices", json.dumps(options)), parse)


def check_choices(choices: Any) -> tuple[str, ...]:
    """The choices as a tuple; raises InvalidChoices for none, a non-string, an empty one or a duplicate."""
    if isinstance(choices, str) or not hasattr(choices, "__iter__"):
        raise InvalidChoices(f"choices must be a list of strings; got {type(choices).__name__}.")
    options = tuple(choices)
    if not options:
        raise InvalidChoices("choices is empty; give at least one.")
    for index, option in enumerate(options):
        if not isinstance(option, str):
            raise InvalidChoices(f"choices[{index}] must be a string; got {type(option).__name__}.")
        if not option:
            raise InvalidChoices(f"choices[{index}] is empty.")
        check_text(option, f"choices[{index}]")
        if option in options[:index]:
            raise InvalidChoices(f"choices[{index}] repeats {option!r}.")
    return options


def _grammar(kind: Any, spec: str) -> GrammarSpec:
    return GrammarSpec(kind=kind, spec=spec)


def _parse_bool(text: str) -> bool:
    if text not in BOOL:
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _of_literal(values: tuple[Any, ...]) -> Typed:
    by_text = {value if isinstance(value, str) else json.dumps(value): value for value in values}
    check_choices(list(by_text))

    def parse(text: str) -> Any:
        if text not in by_text:
            raise ValueError(f"{text!r} is none of the choices")
        return by_text[text]

    return Typed("choices", _grammar("choices", json.dumps(list(by_text))), parse)


def _of_adapter(kind: Any, label: str) -> Typed:
    import pydantic  # only programs with structured types pay for it

    try:
        adapter = pydantic.TypeAdapter(kind)
        schema = adapter.json_schema()
    except Exception as error:  # pydantic raises many kinds for things that are no types, and says much
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise InvalidSchema(f"{label}={kind!r} cannot be turned into a JSON schema: {why}") from error
    name = getattr(kind, "__name__", str(kind))
    return Typed(name, _grammar("json_schema", json.dumps(close_objects(schema))), adapter.validate_json)


def close_objects(schema: Any) -> Any:
    """The schema with every object that lists its properties closed to others, so that the grammar is finite."""
    if isinstance(schema, list):
        return [close_objects(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close_objects(value) for key, value in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
