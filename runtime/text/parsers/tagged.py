"""Parsers of calls between markers. A family gives its markers and how the text between them reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from runtime.text.parsers.base import CallStart, Event, Text, first_marker, partial_length
from runtime.text.parsers.json_call import Malformed


class Section(ABC):
    """Reads what follows an opening marker, character by character, until `done`.

    May raise Malformed; if no call had started by then, the text goes back to the visible answer.
    """

    done = False
    pushback = ""  # text read before a Malformed that belongs to what follows the section

    @abstractmethod
    def feed(self, char: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The answer ended inside the section."""
        return []


class TaggedParser(ABC):
    """Visible text until a marker opens a section; after the section, text again.

    Blanks next to a section belong to neither. A section that turns out malformed before its first call is
    shown as text; after that, its calls stand as far as they came and the rest is text. Nothing is repaired.
    """

    markers: Sequence[str] = ()

    def __init__(self) -> None:
        self._held = ""
        self._section: Section | None = None
        self._raw: str | None = None  # the section's text while no call has started
        self._n_calls = 0
        self._at_edge = False  # right after a section: blanks are dropped
        self._virgin = True  # nothing but blanks so far

    @abstractmethod
    def open(self, marker: str, index: int) -> Section | None:
        """The section that `marker` opens (None: the marker is noise); its first call has number `index`."""

    def open_bare(self, index: int) -> Section | None:
        """The section that the very beginning of the answer (`_held`, no blanks before it) opens, if it does."""
        return None

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and (self._in_section(events) if self._section else self._in_text(events)):
            pass
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._section is not None:
            try:
                events += self._count(self._section.finish())
            except Malformed:
                events = []
            if self._raw is not None and not _has_start(events):
                events = [Text(self._raw)]
        elif rest := self._held:
            events.append(Text(rest))
        self._held, self._raw, self._section = "", None, None
        return events

    def _in_text(self, events: list[Event]) -> bool:
        if self._at_edge:
            self._held = self._held.lstrip()
            if not self._held:
                return False
        if self._virgin and (head := self._held.lstrip()):
            self._virgin = False
            if (section := self.open_bare(self._n_calls)) is not None:
                blanks = self._held[: len(self._held) - len(head)]
                self._held, self._raw, self._section = head, blanks, section
                return True
        found = first_marker(self._held, self.markers)
        if found is None:
            certain = len(self._held) - partial_length(self._held, self.markers)
            certain = len(self._held[:certain].rstrip())
            if certain:
                events.append(Text(self._held[:certain]))
                self._held = self._held[certain:]
                self._at_edge = False
            return False
        at, marker = found
        shown = self._held[:at].rstrip()
        if shown:
            events.append(Text(shown))
        self._raw = self._held[len(shown) : at + len(marker)]
        self._held = self._held[at + len(marker) :]
        self._section = self.open(marker, self._n_calls)
        if self._section is None:
            self._raw, self._at_edge = None, True
        return True

    def _in_section(self, events: list[Event]) -> bool:
        section = self._section
        assert section is not None
        for i, char in enumerate(self._held):
            try:
                news = section.feed(char)
            except Malformed:
                self._give_up(events, i)
                return True
            if self._raw is not None:
                self._raw = None if _has_start(news) else self._raw + char
            events += self._count(news)
            if section.done:
                self._held, self._section, self._raw, self._at_edge = self._held[i + 1 :], None, None, True
                return True
        self._held = ""
        return False

    def _give_up(self, events: list[Event], at: int) -> None:
        """Leave the section before character `at`; its text is shown if no call had started."""
        assert self._section is not None
        if self._raw is None:
            self._held, self._at_edge = self._section.pushback + self._held[at:], True
        else:
            events.append(Text(self._raw))
            self._held, self._at_edge = self._held[at:], False
        self._section = self._raw = None

    def _count(self, events: list[Event]) -> list[Event]:
        self._n_calls += sum(isinstance(event, CallStart) for event in events)
        return events


def _has_start(events: Sequence[Event]) -> bool:
    return any(isinstance(event, CallStart) for event in events)
