"""Reads one tool call written as a JSON object, character by character, arguments passed on as they come."""

from __future__ import annotations

import json
from enum import Enum, auto

from runtime.text.parsers.base import CallArgs, CallEnd, CallStart, Event

_SPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters", "args")
NAME_KEYS = ("name", "function", "tool")


class Malformed(Exception):
    """The text is no call."""


class Part(Enum):
    """Where a character stands to a JSON value."""

    BEFORE = auto()
    INSIDE = auto()
    LAST = auto()
    PAST = auto()


class JsonValue:
    """Finds the end of one JSON value. `feed` says what the character is: part of it, its end, or past it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self._started = self._scalar = False

    def feed(self, char: str) -> Part:
        if self._in_string:
            return self._feed_string(char)
        if not self._started:
            return self._feed_first(char)
        if self._scalar:
            return Part.PAST if char in ",}]" or char in _SPACE else Part.INSIDE
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                return Part.LAST
        return Part.INSIDE

    def _feed_string(self, char: str) -> Part:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 0:
                return Part.LAST
        return Part.INSIDE

    def _feed_first(self, char: str) -> Part:
        if char in _SPACE:
            return Part.BEFORE
        self._started = True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth = 1
        elif char in ",}]:":
            raise Malformed
        else:
            self._scalar = True
        return Part.INSIDE


class ArgumentStream:
    """Arguments as JSON text: an object goes through as it comes; a string that holds JSON is unwrapped.

    `null` and the empty string stand for no arguments.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._value = JsonValue()
        self._buffer = ""
        self._streams: bool | None = None  # unknown until the first character

    def feed(self, char: str) -> tuple[list[Event], Part]:
        part = self._value.feed(char)
        if part is Part.BEFORE:
            return [], part
        if self._streams is None:
            self._streams = char == "{"
        if self._streams:
            return [CallArgs(self._index, char)], part
        if part is not Part.PAST:
            self._buffer += char
        if part is Part.INSIDE:
            return [], part
        return [CallArgs(self._index, self._unwrapped())], part

    def _unwrapped(self) -> str:
        try:
            value = json.loads(self._buffer)
            if isinstance(value, str):
                value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise Malformed from error
        if value is None:
            return "{}"
        if not isinstance(value, dict):
            raise Malformed
        return json.dumps(value, ensure_ascii=False)


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class JsonCall:
    """One object `{"name": …, "arguments": {…}}`, keys in any order, other keys ignored.

    Feed characters until `closed`. Events: CallStart once the name is known (arguments that came earlier
    follow it), CallArgs, CallEnd at the closing brace. Raises Malformed on anything else; `started` then says
    whether a CallStart went out.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._at = _At.OPEN
        self._key = ""
        self._value: JsonValue | ArgumentStream = JsonValue()
        self._text = ""
        self._name = ""
        self._nested = 0  # inside {"function": {"name": …}}
        self._early: list[Event] = []  # arguments before the name
        self._has_arguments = False
        self.started = False
        self.closed = False

    def feed(self, char: str) -> list[Event]:
        if self._at is _At.IN_KEY:
            return self._in_key(char)
        if self._at is _At.VALUE:
            return self._in_value(char)
        if char in _SPACE:
            return []
        step = {_At.OPEN: self._open, _At.KEY: self._before_key, _At.COLON: self._colon, _At.NEXT: self._next}
        return step[self._at](char)

    def _open(self, char: str) -> list[Event]:
        if char != "{":
            raise Malformed
        self._at = _At.KEY
        return []

    def _before_key(self, char: str) -> list[Event]:
        if char == "}":
            return self._close()
        if char != '"':
            raise Malformed
        self._at, self._key = _At.IN_KEY, ""
        return []

    def _in_key(self, char: str) -> list[Event]:
        if char == '"':
            self._at = _At.COLON
        else:
            self._key += char
        return []

    def _colon(self, char: str) -> list[Event]:
        if char != ":":
            raise Malformed
        self._at, self._text = _At.VALUE, ""
        is_arguments = self._key in ARGUMENT_KEYS
        self._has_arguments |= is_arguments
        self._value = ArgumentStream(self._index) if is_arguments else JsonValue()
        return []

    def _in_value(self, char: str) -> list[Event]:
        if isinstance(self._value, ArgumentStream):
            events, part = self._value.feed(char)
            if not self.started:
                self._early += events
                events = []
        else:
            if self._key == "function" and not self._text and char == "{":
                self._nested += 1
                self._at = _At.KEY
                return []
            events, part = [], self._value.feed(char)
            if part in (Part.INSIDE, Part.LAST):
                self._text += char
        if part in (Part.LAST, Part.PAST):
            self._at = _At.NEXT
            events = events + self._value_done()
            if part is Part.PAST and char not in _SPACE:
                events += self._next(char)
        return events

    def _value_done(self) -> list[Event]:
        if self._key not in NAME_KEYS or not self._text.startswith('"') or self._name:
            return []
        try:
            self._name = json.loads(self._text)
        except ValueError as error:
            raise Malformed from error
        if not self._name:
            raise Malformed
        self.started = True
        early, self._early = self._early, []
        return [CallStart(self._index, self._name), *early]

    def _next(self, char: str) -> list[Event]:
        if char == ",":
            self._at = _At.KEY
            return []
        if char == "}":
            return self._close()
        raise Malformed

    def _close(self) -> list[Event]:
        if self._nested:
            self._nested -= 1
            self._at = _At.NEXT
            return []
        if not self.started:
            raise Malformed
        self.closed = True
        rest: list[Event] = [] if self._has_arguments else [CallArgs(self._index, "{}")]
        return [*rest, CallEnd(self._index)]
