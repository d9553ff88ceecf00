"""Thoughts before the answer: `<think>…</think>` and its kin, around any parser of the rest.

Only the first block counts: after its end everything is answer, whatever tags it writes. Inside it nothing
is parsed, so markup in thoughts never becomes a tool call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from runtime.text.parsers.base import Event, Parser, Thought, partial_length


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The markers of one family."""

    open: str
    close: str


class Start(Enum):
    """What the prompt says about the answer's beginning."""

    THINKING = auto()  # the prompt ends with the open tag
    ANSWERING = auto()  # the prompt has closed the block: thinking is off
    UNKNOWN = auto()  # the model opens the block itself, or does not think


class _State(Enum):
    MAYBE = auto()
    THINKING = auto()
    AFTER = auto()  # between the close tag and the first visible character
    ANSWER = auto()


def start_of(prompt: str, tags: ThinkTags) -> Start:
    """How the answer to `prompt` begins, read off the prompt's end."""
    tail = prompt.rstrip()
    if tail.endswith(tags.open):
        return Start.THINKING
    return Start.ANSWERING if tail.endswith(tags.close) else Start.UNKNOWN


def thinking_tokens(pieces: Iterable[bytes], tags: ThinkTags, start: Start) -> int:
    """How many of an answer's tokens (given by their bytes) are thought, those of the tags included."""
    opening, closing = tags.open.encode(), tags.close.encode()
    said, n, sure = b"", 0, start is Start.THINKING
    if start is Start.ANSWERING:
        return 0
    for n, piece in enumerate(pieces, 1):
        before = max(0, len(said) - len(closing))
        said += piece
        if not sure:
            head = said.lstrip()
            sure = head.startswith(opening)
            if not sure and not opening.startswith(head):
                return 0
        if sure and said.find(closing, before) >= 0:
            return n
    return n if sure else 0


class ReasoningParser:
    """Splits thoughts off, and gives the rest to an inner parser."""

    def __init__(self, tags: ThinkTags, start: Start, inner: Parser) -> None:
        self._tags = tags
        self._inner = inner
        self._held = ""
        self._state = {
            Start.THINKING: _State.THINKING,
            Start.ANSWERING: _State.ANSWER,
            Start.UNKNOWN: _State.MAYBE,
        }[start]
        self._any_thought = False

    def push(self, text: str) -> list[Event]:
        if self._state is _State.ANSWER:
            return self._inner.push(text)
        self._held += text
        return self._advance()

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.THINKING and (rest := self._held.rstrip()):
            events.append(Thought(rest))
        elif self._state is _State.MAYBE and self._held:
            events += self._inner.push(self._held)
        self._held = ""
        return events + self._inner.finish()

    def _advance(self) -> list[Event]:
        """Consume held text as far as it is certain."""
        events: list[Event] = []
        steps: dict[_State, Callable[[list[Event]], bool]] = {
            _State.MAYBE: self._maybe,
            _State.THINKING: self._thinking,
            _State.AFTER: self._after,
        }
        while self._state in steps and steps[self._state](events):
            pass
        if self._state is _State.ANSWER and self._held:
            held, self._held = self._held, ""
            events += self._inner.push(held)
        return events

    def _maybe(self, events: list[Event]) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._tags.open):
            self._held, self._state = text[len(self._tags.open) :], _State.THINKING
            return True
        if self._tags.open.startswith(text):
            return False
        self._state = _State.ANSWER
        return True

    def _thinking(self, events: list[Event]) -> bool:
        if not self._any_thought:  # the template's own open tag may be repeated by the model
            self._held = self._held.lstrip()
            if self._held.startswith(self._tags.open):
                self._held = self._held[len(self._tags.open) :].lstrip()
            if self._held and self._tags.open.startswith(self._held):
                return False
        end = self._held.find(self._tags.close)
        if end >= 0:
            if thought := self._held[:end].rstrip():
                events.append(Thought(thought))
            self._held, self._state = self._held[end + len(self._tags.close) :], _State.AFTER
            return True
        keep = partial_length(self._held, [self._tags.close])
        certain = self._held[: len(self._held) - keep].rstrip()  # blanks before the close tag are not thought
        if certain:
            events.append(Thought(certain))
            self._any_thought = True
            self._held = self._held[len(certain) :]
        return False

    def _after(self, events: list[Event]) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._state = _State.ANSWER
        return True
