"""Readers of answers whose form a grammar has promised: a list of calls, or the arguments of one named call."""

from __future__ import annotations

from runtime.text.parsers.base import CallArgs, CallEnd, CallStart, Event
from runtime.text.parsers.json_call import Malformed
from runtime.text.parsers.sections import JsonCalls


class ForcedCalls:
    """`[{"name": …, "arguments": {…}}, …]` under a grammar. A call cut off by the token limit stays unfinished."""

    def __init__(self) -> None:
        self._calls = JsonCalls(0)

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for char in text:
            if self._calls.done:
                break
            try:
                events += self._calls.feed(char)
            except Malformed:
                self._calls.done = True
        return events

    def finish(self) -> list[Event]:
        return []


class ForcedArguments:
    """The whole answer is the arguments of call 0, whose name is known beforehand."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False
        self._depth = 0
        self._quoted = self._escaped = self._closed = False

    def push(self, text: str) -> list[Event]:
        if not self._started:
            text = text.lstrip()
        if not text or self._closed:
            return []
        start: list[Event] = [] if self._started else [CallStart(0, self._name)]
        self._started = True
        for i, char in enumerate(text):
            self._step(char)
            if self._closed:
                return [*start, CallArgs(0, text[: i + 1]), CallEnd(0)]
        return [*start, CallArgs(0, text)]

    def finish(self) -> list[Event]:
        return []

    def _step(self, char: str) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._closed = self._depth == 0
