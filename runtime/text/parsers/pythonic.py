"""Tool calls in Python's notation, read with `ast` and never evaluated."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from typing import Any

from runtime.text.parsers.base import CallArgs, CallEnd, CallStart, Event
from runtime.text.parsers.json_call import Malformed
from runtime.text.parsers.tagged import Section

MAX_CALL_CHARS = 1 << 20
_JSON_NAMES = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class PythonicCalls(Section):
    """`[f(a=1), g(b="x")]`. Each call is given whole, at its closing parenthesis.

    `known`: names of which the first call must bear one, else the list is text.
    """

    def __init__(self, index: int, known: Collection[str]) -> None:
        self._index = self._first = index
        self._known = known
        self._source = ""  # of the call being read
        self._open: list[str] = []  # brackets inside it
        self._quote = ""
        self._escaped = False
        self._in_list = False

    def feed(self, char: str) -> list[Event]:
        if not self._in_list:
            if char.isspace():
                return []
            if char != "[":
                raise Malformed
            self._in_list = True
            return []
        if not self._source:
            return self._between(char)
        self._source += char
        if len(self._source) > MAX_CALL_CHARS:
            raise Malformed
        if self._quote:
            self._in_string(char)
            return []
        return self._in_call(char)

    def _between(self, char: str) -> list[Event]:
        if char == "]":
            self.done = True
        elif char.isidentifier():
            self._source = char
        elif not (char.isspace() or char == ","):
            raise Malformed
        return []

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _in_call(self, char: str) -> list[Event]:
        if not self._open and not (char == "(" or char == "." or char.isidentifier() or char.isdigit()):
            raise Malformed
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            self._open.append(char)
            if len(self._open) == 1 and self._index == self._first and self._source[:-1] not in self._known:
                raise Malformed
        elif char in ")]}":
            self._open.pop()
            if not self._open:
                return self._call_done()
        return []

    def _call_done(self) -> list[Event]:
        name, arguments = parse_call(self._source)
        index, self._index, self._source = self._index, self._index + 1, ""
        return [CallStart(index, name), CallArgs(index, arguments), CallEnd(index)]


def parse_call(source: str) -> tuple[str, str]:
    """Name and JSON arguments of `f(a=1)`. Raises Malformed for anything but literal keyword arguments."""
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error
    if not isinstance(tree, ast.Call) or tree.args or any(k.arg is None for k in tree.keywords):
        raise Malformed
    values = {str(keyword.arg): _literal(keyword.value) for keyword in tree.keywords}
    return ast.unparse(tree.func), json.dumps(values, ensure_ascii=False)


def _literal(node: ast.expr) -> Any:
    """The value of a literal. JSON's own names for truth and nothing are understood too."""
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float | bool):
            return value
        case ast.Name(id) if id in _JSON_NAMES:
            return _JSON_NAMES[id]
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            return {str(_literal(k)): _literal(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
    raise Malformed
