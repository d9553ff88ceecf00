"""One row for every keyword: a schema, texts it must take, texts it must refuse. The docs' table is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    keyword: str
    schema: Any
    good: tuple[str, ...]
    bad: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        return self.keyword


@dataclass(frozen=True)
class Refused:
    keyword: str
    schema: Any
    pointer: str

    def __str__(self) -> str:
        return self.keyword


def obj(**props: Any) -> dict[str, Any]:
    return {"type": "object", "properties": props, "required": list(props)}


_DRAFT4 = "http://json-schema.org/draft-04/schema#"
_DRAFT7 = "http://json-schema.org/draft-07/schema#"
INT, STR = {"type": "integer"}, {"type": "string"}
TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"v": INT, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
    },
    "$ref": "#/$defs/node",
}

ROWS = [
    Row("type", STR, ('""', '"a\\n\\"é😀"'), ("1", "null", '"a')),
    Row("type: integer", INT, ("0", "-12", "99999999999999999999"), ("02", "-0", "1.5", "+1")),
    Row("type: number", {"type": "number"}, ("0", "-1.50", "1e5", "2E-3"), ("01", ".5", "1.", "NaN")),
    Row("type: boolean", {"type": "boolean"}, ("true", "false"), ("True", "0")),
    Row("type: null", {"type": "null"}, ("null",), ("None", '""')),
    Row("type: list", {"type": ["string", "null"]}, ('"x"', "null"), ("1", "true")),
    Row("nullable", {"type": "string", "nullable": True}, ('"x"', "null"), ("1",), "OpenAPI's meaning"),
    Row("true schema", True, ("1", '{"a": [null]}'), ("{",)),
    Row("enum", {"enum": ["add", 1.5, None, {"a": [1]}]}, ('"add"', "1.5", "null", '{"a": [1]}'), ('"ad"', "1")),
    Row("const", {"const": "naïve—😀"}, ('"naïve—😀"',), ('"naive"', '"naïve"')),
    Row("enum with type", {"type": "string", "enum": ["a", 1, "b"]}, ('"a"', '"b"'), ("1",)),
    Row("minLength", {"type": "string", "minLength": 2}, ('"ab"', '"\\n\\""', '"日本"'), ('"a"', '""')),
    Row("maxLength", {"type": "string", "maxLength": 3}, ('""', '"abc"', '"\\n\\n\\n"'), ('"abcd"',)),
    Row("pattern", {"type": "string", "pattern": "^[a-z]+-\\d{2}$"}, ('"ab-12"',), ('"ab-1"', '"-12"')),
    Row("pattern, unanchored", {"type": "string", "pattern": "b+"}, ('"b"', '"abba"'), ('"aa"', '""')),
    Row("pattern, branches", {"type": "string", "pattern": "^cat$|^dog$"}, ('"cat"', '"dog"'), ('"catdog"',)),
    Row(
        "pattern with lengths",
        {"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 4},
        ('"aaa"', '"aaaa"'),
        ('"aa"', '"aaaaa"'),
    ),
    Row("format: date", {"type": "string", "format": "date"}, ('"2024-02-29"',), ('"2023-02-29"', '"2024-13-01"')),
    Row("format: time", {"type": "string", "format": "time"}, ('"10:00:00Z"', '"23:59:59.5+01:00"'), ('"24:00:00Z"',)),
    Row("format: date-time", {"type": "string", "format": "date-time"}, ('"2024-02-29T10:00:00Z"',), ('"2024-02-29"',)),
    Row("format: email", {"type": "string", "format": "email"}, ('"a.b@c.org"',), ('"a.b"', '"@c"')),
    Row("format: uuid", {"type": "string", "format": "uuid"}, ('"123e4567-e89b-12d3-a456-426614174000"',), ('"12"',)),
    Row("format: ipv4", {"type": "string", "format": "ipv4"}, ('"192.168.0.1"',), ('"256.1.1.1"', '"1.2.3"')),
    Row("format: ipv6", {"type": "string", "format": "ipv6"}, ('"::1"', '"1:2:3:4:5:6:7:8"'), ('":1"', '"1::2::3"')),
    Row("format: uri", {"type": "string", "format": "uri"}, ('"https://a.org/b?c=d#e"',), ('"a b"', '"//a"')),
    Row("format: hostname", {"type": "string", "format": "hostname"}, ('"a-b.org"',), ('"-a"', '"a..b"')),
    Row(
        "format: duration",
        {"type": "string", "format": "duration"},
        ('"P1Y2M3DT4H5M6S"', '"PT36H"', '"P2W"'),
        ('"P"', '"PT"', '"1D"', '"P1H"', '"P1D2W"'),
    ),
    Row("format: json-pointer", {"type": "string", "format": "json-pointer"}, ('""', '"/a/0/~1b"'), ('"a"', '"/~2"')),
    Row("format: int32", {"type": "integer", "format": "int32"}, ("2147483647",), ("2147483648",), "a range"),
    Row(
        "format: int64",
        {"type": "number", "format": "int64"},
        ("9223372036854775807", "-9223372036854775808", "0"),
        ("9223372036854775808", "-9223372036854775809", "0.5"),
        "a range",
    ),
    Row("format: float", {"type": "number", "format": "float"}, ("0.5", "1e39"), ('"a"',), "says nothing"),
    Row("format: double", {"type": "number", "format": "double"}, ("0.5", "1e99"), ('"a"',), "says nothing"),
    Row("format: password", {"type": "string", "format": "password"}, ('""', '"a"'), ("1",), "says nothing"),
    Row("minimum", {"type": "integer", "minimum": -5}, ("-5", "-3", "7"), ("-6",)),
    Row("maximum", {"type": "number", "maximum": 4}, ("4", "4.0", "-0.5", "3.999"), ("4.1", "5")),
    Row("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, ("0.1", "3"), ("0", "0.0", "-1")),
    Row(
        "exclusiveMinimum: true (draft 4)",
        {"$schema": _DRAFT4, "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        ("4", "10"),
        ("3", "2"),
    ),
    Row("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10}, ("9", "-100"), ("10",)),
    Row(
        "exclusiveMaximum: true (draft 4)",
        {"$schema": _DRAFT4, "type": "number", "maximum": 2.5, "exclusiveMaximum": True},
        ("2.49", "-3"),
        ("2.5", "2.50", "3"),
    ),
    Row("multipleOf: integer", {"type": "integer", "multipleOf": 7}, ("0", "49"), ("8",)),
    Row("multipleOf: number", {"type": "number", "multipleOf": 0.5, "maximum": 3}, ("1.5", "2"), ("1.2", "3.5")),
    Row(
        "properties",
        obj(a=INT, b=STR),
        ('{"a": 1, "b": ""}',),
        ('{"a": 1}', '{"a": "x", "b": ""}', '{"b": "", "a": 1}'),
    ),
    Row(
        "properties, optional",
        {"type": "object", "properties": {"a": INT, "b": STR}},
        ("{}", '{"b": "x"}'),
        ('{"c": 1}',),
    ),
    Row(
        "required, not listed",
        {"type": "object", "properties": {"a": INT}, "required": ["b"]},
        ('{"b": null}', '{"a": 1, "b": "x"}'),
        ("{}", '{"a": 1}'),
    ),
    Row(
        "additionalProperties: schema",
        {"type": "object", "properties": {"a": STR}, "additionalProperties": INT},
        ('{"a": "x", "b": 1}', '{"b": 1}', '{"ab": 2}'),
        ('{"a": 1}', '{"b": "x"}', '{"a": "x", "a": 1}', '{"\\u0061": 1}'),
    ),
    Row(
        "additionalProperties: false",
        obj(a=INT) | {"additionalProperties": False},
        ('{"a": 1}',),
        ('{"a": 1, "b": 2}',),
    ),
    Row(
        "additionalProperties: true", obj(a=INT) | {"additionalProperties": True}, ('{"a": 1, "b": []}',), ('{"b": 1}',)
    ),
    Row(
        "patternProperties",
        {"type": "object", "properties": {"n": STR}, "patternProperties": {"^x_": INT}, "required": ["n"]},
        ('{"n": "n", "x_1": 2}', '{"n": ""}'),
        ('{"n": "n", "x_1": "a"}', '{"n": "n", "y": 1}'),
    ),
    Row(
        "patternProperties and additionalProperties",
        {"type": "object", "patternProperties": {"^x_": INT}, "additionalProperties": {"type": "null"}},
        ('{"x_1": 2, "y": null}', "{}"),
        ('{"x_1": null}', '{"y": 1}'),
    ),
    Row(
        "propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^k[0-9]$"}, "additionalProperties": INT},
        ('{"k1": 1}', "{}"),
        ('{"k1": "x"}', '{"x": 1}'),
    ),
    Row(
        "propertyNames: maxLength",
        {"type": "object", "propertyNames": {"maxLength": 2}},
        ('{"ab": 1}',),
        ('{"abc": 1}',),
    ),
    Row(
        "minProperties",
        {"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1, "additionalProperties": False},
        ('{"b": 1}', '{"a": 1, "b": 2}'),
        ("{}",),
    ),
    Row("maxProperties", {"type": "object", "maxProperties": 1}, ("{}", '{"a": 1}'), ('{"a": 1, "b": 2}',)),
    Row("items", {"type": "array", "items": INT}, ("[]", "[1, 2]"), ('["a"]', "[1,2]")),
    Row("minItems", {"type": "array", "items": INT, "minItems": 2}, ("[1, 2]", "[1, 2, 3]"), ("[]", "[1]")),
    Row("maxItems", {"type": "array", "items": INT, "maxItems": 2}, ("[]", "[1, 2]"), ("[1, 2, 3]",)),
    Row(
        "prefixItems",
        {"type": "array", "prefixItems": [INT, STR], "items": False},
        ("[]", '[1, "a"]'),
        ('["a"]', '[1, "a", 2]'),
    ),
    Row(
        "items: array (draft 7)",
        {"$schema": _DRAFT7, "items": [INT, STR], "additionalItems": False, "type": "array"},
        ('[1, "a"]',),
        ("[1, 2]",),
    ),
    Row(
        "additionalItems: schema (draft 7)",
        {"$schema": _DRAFT7, "type": "array", "items": [INT], "additionalItems": {"type": "boolean"}},
        ("[]", "[1]", "[1, true, false]"),
        ("[true]", "[1, 2]", "[1, true, null]"),
    ),
    Row("contains", {"type": "array", "items": INT, "contains": {"const": 5}}, ("[5]", "[1, 5, 2]"), ("[]", "[1]")),
    Row(
        "minContains",
        {"type": "array", "items": INT, "contains": {"minimum": 9}, "minContains": 2, "maxItems": 3},
        ("[9, 10]", "[1, 9, 11]"),
        ("[9]", "[9, 1, 1]", "[9, 9, 9, 9]"),
    ),
    Row(
        "uniqueItems",
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        ("[]", '["c", "a"]'),
        ('["a", "a"]',),
        "items of an enum of at most 8 values",
    ),
    Row(
        "anyOf",
        {"anyOf": [INT, {"type": "array", "items": STR}]},
        ("1", '["a"]'),
        ('"a"', "[1]"),
    ),
    Row(
        "anyOf beside properties",
        {
            "type": "object",
            "properties": {"op": {"enum": ["add", "del"]}, "key": STR, "val": STR},
            "required": ["op"],
            "additionalProperties": False,
            "anyOf": [{"required": ["key"]}, {"required": ["val"]}],
        },
        ('{"op": "add", "key": "k"}', '{"op": "del", "val": ""}'),
        ("42", '{"op": "zap"}', '{"op": "add"}'),
    ),
    Row("oneOf, apart", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, ("1", '"a"'), ("null",)),
    Row(
        "oneOf, overlapping",
        {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
        ("2", "6"),
        ("3", "4", "5"),
    ),
    Row(
        "oneOf, tagged",
        {"oneOf": [obj(kind={"const": "a"}, n=INT), obj(kind={"const": "b"}, s=STR)]},
        ('{"kind": "a", "n": 1}', '{"kind": "b", "s": ""}'),
        ('{"kind": "a", "s": ""}',),
    ),
    Row("allOf", {"allOf": [obj(a=INT), obj(b=STR)]}, ('{"a": 1, "b": ""}',), ('{"a": 1}', "42")),
    Row("allOf of ranges", {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 5}]}, ("3", "5"), ("2", "6")),
    Row("not: enum", {"type": "integer", "not": {"enum": [1, 5]}}, ("2", "-1", "15"), ("1", "5")),
    Row("not: const string", {"type": "string", "not": {"const": "no"}}, ('"n"', '"nope"', '""'), ('"no"',)),
    Row("not: type", {"not": {"type": ["string", "object"]}}, ("1", "null", "[1]"), ('"a"', "{}")),
    Row(
        "not: required",
        {"type": "object", "properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]}},
        ("{}", '{"a": 1}', '{"b": 1}'),
        ('{"a": 1, "b": 1}',),
    ),
    Row(
        "if, then, else",
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "v": INT},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        ('{"k": "a", "v": 1}', '{"k": "b"}'),
        ('{"k": "a"}', '{"k": "b", "v": 1}'),
    ),
    Row(
        "dependentRequired",
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
        ("{}", '{"b": 1}', '{"a": 1, "b": 1}'),
        ('{"a": 1}',),
    ),
    Row(
        "dependentSchemas",
        {
            "type": "object",
            "properties": {"a": INT, "b": INT},
            "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}},
        },
        ('{"b": 1}', '{"a": 1, "b": 5}', '{"a": 1}'),
        ('{"a": 1, "b": 1}',),
    ),
    Row(
        "dependencies (draft 7)",
        {
            "$schema": _DRAFT7,
            "type": "object",
            "properties": {"a": INT, "b": INT, "c": INT},
            "dependencies": {"a": ["b"], "c": {"properties": {"b": {"minimum": 5}}}},
        },
        ("{}", '{"b": 1}', '{"a": 1, "b": 1}', '{"b": 5, "c": 1}', '{"c": 1}'),
        ('{"a": 1}', '{"b": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'),
    ),
    Row(
        "unevaluatedProperties: false",
        {"allOf": [obj(a=INT)], "properties": {"b": INT}, "unevaluatedProperties": False, "type": "object"},
        ('{"b": 2, "a": 1}', '{"a": 1}'),
        ('{"a": 1, "c": 1}',),
    ),
    Row(
        "unevaluatedItems: false",
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
        ("[1]",),
        ("[1, 2]",),
    ),
    Row("$ref to $defs", {"$defs": {"a": INT}, "$ref": "#/$defs/a"}, ("1",), ('"a"',)),
    Row(
        "$ref to definitions",
        {"definitions": {"a": INT}, "properties": {"x": {"$ref": "#/definitions/a"}}},
        ('{"x": 1}',),
        ('{"x": ""}',),
    ),
    Row("$ref, recursive", TREE, ('{"v": 1}', '{"v": 1, "next": {"v": 2}}'), ('{"v": 1, "next": {}}',)),
    Row("$ref beside siblings", {"$defs": {"a": INT}, "$ref": "#/$defs/a", "maximum": 5}, ("5",), ("6",)),
    Row("$anchor", {"$defs": {"a": INT | {"$anchor": "num"}}, "$ref": "#num"}, ("1",), ('"a"',)),
]

REFUSED = [
    Refused("pattern: look-around", {"type": "string", "pattern": "(?=a)b"}, "/pattern"),
    Refused("pattern: back-reference", obj(a={"type": "string", "pattern": "(a)\\1"}), "/properties/a/pattern"),
    Refused("pattern: word boundary", {"type": "string", "pattern": "\\bx"}, "/pattern"),
    Refused("format: any other", {"type": "string", "format": "iban"}, "/format"),
    Refused("uniqueItems, no enum", {"type": "array", "items": INT, "uniqueItems": True}, "/uniqueItems"),
    Refused("maxContains", {"type": "array", "items": INT, "contains": {"const": 5}, "maxContains": 2}, "/maxContains"),
    Refused(
        "minProperties above 1, free keys", obj(a={"type": "object", "minProperties": 2}), "/properties/a/minProperties"
    ),
    Refused("not: pattern", {"type": "string", "not": {"pattern": "a"}}, "/not/pattern"),
    Refused("$ref to another document", obj(a={"$ref": "https://x.org/s"}), "/properties/a/$ref"),
    Refused("$dynamicRef", {"$dynamicRef": "#a"}, "/$dynamicRef"),
    Refused("$id inside", obj(a={"$id": "https://x.org/a", "type": "string"}), "/properties/a/$id"),
    Refused(
        "unevaluatedProperties: schema", {"type": "object", "unevaluatedProperties": INT}, "/unevaluatedProperties"
    ),
    Refused("contentSchema", {"type": "string", "contentSchema": {}}, "/contentSchema"),
    Refused(
        "more than 3 patternProperties",
        {"type": "object", "patternProperties": dict.fromkeys("abcd", INT)},
        "/patternProperties",
    ),
]
