"""The one protocol of all parsers: text in, events out, the same events at any chunking.

`Text` and `Thought` pieces may be cut differently by different chunkings; joined, they are equal. Everything
else is equal event by event once neighbouring `CallArgs` are joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A piece of the visible answer."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins; indexes count from 0 without gaps."""

    index: int
    name: str


class CallArgs(msgspec.Struct, frozen=True):
    """A piece of a call's arguments, as JSON text."""

    index: int
    fragment: str


class CallEnd(msgspec.Struct, frozen=True):
    """A tool call is complete: its arguments join to a JSON object."""

    index: int


Event = Text | Thought | CallStart | CallArgs | CallEnd


class Parser(Protocol):
    """Reads one answer. `finish` is called once, after the last push, and gives what was held back."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class PlainParser:
    """An answer without structure."""

    def push(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class FirstCallOnly:
    """Around a parser: whatever comes after the first complete call is dropped."""

    def __init__(self, inner: Parser) -> None:
        self._inner = inner
        self._done = False

    def push(self, text: str) -> list[Event]:
        return [] if self._done else self._cut(self._inner.push(text))

    def finish(self) -> list[Event]:
        return [] if self._done else self._cut(self._inner.finish())

    def _cut(self, events: list[Event]) -> list[Event]:
        for i, event in enumerate(events):
            if isinstance(event, CallEnd):
                self._done = True
                return events[: i + 1]
        return events


class CallsOrAnswer:
    """An answer that is either calls, begun by one of `openings`, or plain text to its end."""

    def __init__(self, openings: Sequence[str], calls: Parser) -> None:
        self._openings = tuple(openings)
        self._calls = calls
        self._held = ""
        self._chosen: Parser | None = None

    def push(self, text: str) -> list[Event]:
        if self._chosen is None:
            self._held += text
            if not self._held.startswith(self._openings) and any(o.startswith(self._held) for o in self._openings):
                return []
            text = self._choose()
        assert self._chosen is not None
        return self._chosen.push(text)

    def finish(self) -> list[Event]:
        rest = self._choose() if self._chosen is None else ""
        assert self._chosen is not None
        return [*self._chosen.push(rest), *self._chosen.finish()]

    def _choose(self) -> str:
        self._chosen = self._calls if self._held.startswith(self._openings) else PlainParser()
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class Call:
    """A tool call put together. `complete`: its end came and its arguments are a JSON object."""

    name: str
    arguments: str = ""
    complete: bool = False


class Answer:
    """Events put together."""

    __slots__ = ("_texts", "_thoughts", "calls")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self.calls: list[Call] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        return (self.text, self.thought, self.calls) == (other.text, other.thought, other.calls)

    def __repr__(self) -> str:
        return f"Answer(text={self.text!r}, thought={self.thought!r}, calls={self.calls!r})"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        return "".join(self._thoughts)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Text(text):
                    self._texts.append(text)
                case Thought(text):
                    self._thoughts.append(text)
                case CallStart(_, name):
                    self.calls.append(Call(name))
                case CallArgs(index, fragment):
                    self.calls[index].arguments += fragment
                case CallEnd(index):
                    self.calls[index].complete = _is_object(self.calls[index].arguments)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def parse_all(parser: Parser, text: str) -> Answer:
    """A whole answer at once, through the very code that reads it piece by piece."""
    answer = Answer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest marker begins, and which (of those beginning together, the longest)."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def partial_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a marker."""
    for length in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
