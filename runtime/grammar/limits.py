"""Static limits: what a request's grammar may weigh before anyone compiles it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from runtime.errors import InvalidRequest

_MAPS = {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
}
MAX_EXPONENT = 400  # of a number in a schema; a double's end at 308 and -324


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are in bytes of UTF-8 text."""

    json_bytes: int = 256 * 1024
    json_depth: int = 64
    subschemas: int = 2_000
    properties: int = 1_000  # of one object
    enum_bytes: int = 64 * 1024  # of all enums together
    regex_bytes: int = 2 * 1024
    nested_repeat: int = 10_000
    ebnf_bytes: int = 16 * 1024
    choices: int = 5_000
    choices_bytes: int = 64 * 1024
    marker_bytes: int = 256

    def parse(self, text: str, param: str) -> Any:
        """JSON with exact decimals. Raises InvalidRequest for text that is too long, too deep or no JSON."""
        if len(text.encode(errors="replace")) > self.json_bytes:
            reject(f"{param}: the JSON text is longer than {self.json_bytes} bytes.", param)
        if _bracket_depth(text) > self.json_depth * 4:
            reject(f"{param}: JSON nested this deep is not supported.", param)
        try:
            return json.loads(text, parse_float=_decimal, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            reject(f"{param} is not valid JSON: {str(error)[:200]}.", param)

    def check_schema(self, schema: Any, param: str) -> None:
        """Count subschemas, depth, properties and enum bytes. Raises InvalidRequest."""
        enum_bytes = 0
        count = -1  # the schema itself is none of its subschemas
        stack: list[tuple[Any, int, str, bool]] = [(schema, 0, "", False)]
        while stack:
            value, depth, where, is_map = stack.pop()
            count += isinstance(value, dict) and not is_map
            if depth > self.json_depth:
                reject(f"JSON schema at '{where[:200]}': nested more than {self.json_depth} deep.", param)
            if count > self.subschemas:
                reject(f"The JSON schema has more than {self.subschemas} subschemas.", param)
            children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for key, child in children:
                at = f"{where}/{str(key)[:40]}"
                if key == "properties" and isinstance(child, dict) and len(child) > self.properties:
                    reject(f"JSON schema at '{at}': more than {self.properties} properties.", param)
                if key == "enum" and isinstance(child, list):
                    enum_bytes += len(json.dumps(child, default=str))
                    if enum_bytes > self.enum_bytes:
                        reject(f"JSON schema at '{at}': enums hold more than {self.enum_bytes} bytes.", param)
                    continue
                if isinstance(child, (dict, list)):
                    maps = not is_map and key in _MAPS  # a property may be called so
                    stack.append((child, depth + isinstance(child, dict), at, maps))


def reject(message: str, param: str) -> NoReturn:
    raise InvalidRequest(message, param=param)


def _bracket_depth(text: str) -> int:
    """Deepest nesting of brackets outside strings: an upper bound that needs no recursion."""
    depth = deepest = 0
    in_string = escaped = False
    for c in text:
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = in_string
        elif c == '"':
            in_string = not in_string
        elif not in_string:
            if c in "[{":
                depth += 1
                deepest = max(deepest, depth)
            elif c in "]}":
                depth -= 1
    return deepest


def _decimal(text: str) -> Decimal:
    """The exact number. One that only fills memory when it is written out is refused before that."""
    try:
        number = Decimal(text)
    except ArithmeticError:
        number = Decimal("inf")
    if not number:
        return Decimal(0)
    if not number.is_finite() or abs(number.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"the number {text[:40]} is beyond 1e{MAX_EXPONENT} or 1e-{MAX_EXPONENT}")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
