"""The sections that call notations are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from runtime.text.parsers.base import CallEnd, CallStart, Event
from runtime.text.parsers.json_call import ArgumentStream, JsonCall, Malformed, Part
from runtime.text.parsers.tagged import Section

MAX_NAME_CHARS = 512


class EndMarker:
    """Blanks, then exactly this text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._seen = 0

    @property
    def seen(self) -> str:
        return self.text[: self._seen]

    def feed(self, char: str) -> bool:
        """True once complete. Raises Malformed for other text."""
        if self._seen == 0 and char.isspace():
            return False
        if self._seen >= len(self.text) or self.text[self._seen] != char:
            raise Malformed
        self._seen += 1
        return self._seen == len(self.text)


class OneJsonCall(Section):
    """One JSON call, then an end marker (which a model may forget)."""

    def __init__(self, index: int, end: str = "") -> None:
        self._call = JsonCall(index)
        self._tail = EndMarker(end)

    def feed(self, char: str) -> list[Event]:
        if self._call.closed:
            self.pushback = self._tail.seen
            self.done = self._tail.feed(char)
            return []
        events = self._call.feed(char)
        self.done = self._call.closed and not self._tail.text
        return events


class JsonCalls(Section):
    """JSON calls one after the other, separated by `;`, `,` or blanks, in brackets or not.

    `known`: where it is given, the first call must bear one of these names, else all of it is text.
    `end`: the marker that closes the section; without one only a closing bracket does.
    """

    def __init__(
        self, index: int, known: Collection[str] | None = None, end: str = "", *, bracket: bool = False
    ) -> None:
        self._index = self._first = index
        self._known = known
        self._tail = EndMarker(end)
        self._bracket = bracket
        self._closing = False
        self._call: JsonCall | None = None

    def feed(self, char: str) -> list[Event]:
        if self._call is not None:
            return self._in_call(char)
        if self._closing or (self._tail.text and char == self._tail.text[0]):
            self._closing = True
            self.pushback = self._tail.seen
            self.done = self._tail.feed(char)
        elif char == "{":
            self._call = JsonCall(self._index)
            return self._in_call(char)
        elif char == "[" and not self._bracket:
            self._bracket = True
        elif char == "]" and self._bracket:
            self._closing = bool(self._tail.text)
            self.done = not self._closing
        elif not (char.isspace() or char in ",;"):
            raise Malformed
        return []

    def _in_call(self, char: str) -> list[Event]:
        assert self._call is not None
        events = self._call.feed(char)
        for event in events:
            if isinstance(event, CallStart) and self._is_stranger(event):
                raise Malformed
        if self._call.closed:
            self._call = None
            self._index += 1
        return events

    def _is_stranger(self, start: CallStart) -> bool:
        return self._known is not None and start.index == self._first and start.name not in self._known


class NamedArguments(Section):
    """A bare name, a separator, the arguments object, an end marker. A `cut` marker ends the name early."""

    def __init__(self, index: int, separator: str, cut: Sequence[str] = (), end: str = "") -> None:
        self._index = index
        self._separator = separator
        self._cut = cut
        self._head = ""
        self._arguments: ArgumentStream | None = None
        self._closed = False
        self._tail = EndMarker(end)

    def feed(self, char: str) -> list[Event]:
        if self._closed:
            self.pushback = self._tail.seen
            self.done = self._tail.feed(char)
            return []
        if self._arguments is None:
            return self._in_head(char)
        events, part = self._arguments.feed(char)
        if part is Part.PAST:
            raise Malformed
        if part is Part.LAST:
            events.append(CallEnd(self._index))
            self._closed = True
            self.done = not self._tail.text
        return events

    def _in_head(self, char: str) -> list[Event]:
        self._head += char
        if self._head.endswith(self._separator):
            name = self.name_of(self._head[: -len(self._separator)])
            return [] if name is None else self._begin(name)
        if len(self._head) > MAX_NAME_CHARS:
            raise Malformed
        return []

    def _begin(self, name: str) -> list[Event]:
        if not name:
            raise Malformed
        self._arguments = ArgumentStream(self._index)
        return [CallStart(self._index, name)]

    def name_of(self, head: str) -> str | None:
        """The name before the separator; None to read on."""
        for cut in self._cut:
            head = head.partition(cut)[0]
        return head.strip()
