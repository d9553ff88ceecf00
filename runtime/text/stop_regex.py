"""Stops given as regular expressions, matched as bytes come: in linear time, and alike however the bytes are cut.

All expressions are followed at once, from every place a match may begin. The match that *ends* first wins, and of
those that end together the one that began first: `[0-9]+` stops at the first digit. Text that a match may still
begin in is held back, so an expression that can go on for ever holds back for ever. A character costs at most a
visit to every state, and there are few: no expression can slow down the step that all requests share.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache

from runtime.errors import InvalidRequest
from runtime.grammar.regex import RegexError, parse_full
from runtime.grammar.regular import Alt, Class, Regex, Repeat, Seq, lit
from runtime.text.stops import StopHit

MAX_STATES = 1000
MAX_PATTERN_CHARS = 1024
_decoder = codecs.getincrementaldecoder("utf-8")
Edge = tuple[Class, int]


class Automaton:
    """States without memory of their own; `names[s]` is the stop whose match is complete in state s."""

    def __init__(self, stops: Sequence[str], patterns: Sequence[str]) -> None:
        self.edges: list[list[Edge]] = []
        self.free: list[list[int]] = []  # states reached without a character
        self.names: dict[int, str] = {}
        self.start = self._state()
        for name, regex in (*((s, lit(s)) for s in stops), *((p, _parse(p)) for p in patterns)):
            end = self._add(regex, self.start)
            self.names[end] = name
        self.opening: dict[int, int] = {}
        self.reach(self.start, 0, self.opening)
        if any(state in self.names for state in self.opening):
            raise InvalidRequest("stop_regex must not match the empty text.", param="stop_regex")

    def reach(self, state: int, began: int, live: dict[int, int]) -> None:
        """Add `state`, and all that is reached from it without a character, to those that are live."""
        if state in live:
            return
        live[state] = began
        todo = [state]
        while todo:
            for target in self.free[todo.pop()]:
                if target not in live:
                    live[target] = began
                    todo.append(target)

    def step(self, live: dict[int, int], char: int) -> dict[int, int]:
        """The states after one more character. `live`, and what is returned: state -> where its match began, in order
        of that, so that the first to reach a state is the match that began first."""
        after: dict[int, int] = {}
        fits: dict[int, bool] = {}  # by class: many states bear one
        for state, began in live.items():
            for cls, target in self.edges[state]:
                fit = fits.get(id(cls))
                if fit is None:
                    fit = fits[id(cls)] = any(low <= char <= high for low, high in cls.ranges)
                if fit:
                    self.reach(target, began, after)
        return after

    def _state(self) -> int:
        if len(self.edges) >= MAX_STATES:
            raise InvalidRequest(f"stop_regex needs more than {MAX_STATES} states.", param="stop_regex")
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def _add(self, regex: Regex, at: int) -> int:
        """Lay `regex` from state `at` on; the state where it ends."""
        if isinstance(regex, Class):
            end = self._state()
            self.edges[at].append((regex, end))
            return end
        if isinstance(regex, Seq):
            for item in regex.items:
                at = self._add(item, at)
            return at
        if isinstance(regex, Alt):
            end = self._state()
            for item in regex.items:
                begin = self._state()
                self.free[at].append(begin)
                self.free[self._add(item, begin)].append(end)
            return end
        return self._repeat(regex, at)

    def _repeat(self, regex: Repeat, at: int) -> int:
        for _ in range(regex.low):
            at = self._add(regex.item, at)
        if regex.high is None:
            loop = self._state()
            self.free[at].append(loop)
            self.free[self._add(regex.item, loop)].append(loop)
            return loop
        end = self._state()
        for _ in range(regex.high - regex.low):
            self.free[at].append(end)
            at = self._add(regex.item, at)
        self.free[at].append(end)
        return end


@lru_cache(256)
def automaton(stops: tuple[str, ...], patterns: tuple[str, ...]) -> Automaton:
    """The automaton of these stops. Raises InvalidRequest for an expression that cannot be followed."""
    try:
        return Automaton(stops, patterns)
    except RecursionError:
        raise InvalidRequest("stop_regex is nested too deep.", param="stop_regex") from None


def _parse(pattern: str) -> Regex:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"A stop_regex may have {MAX_PATTERN_CHARS} characters.", param="stop_regex")
    try:
        return parse_full(pattern)
    except RegexError as error:
        raise InvalidRequest(f"stop_regex {pattern!r:.80} cannot be read: {error}.", param="stop_regex") from None


class StopScanner:
    """Follows one text. Offsets count bytes from its beginning."""

    def __init__(self, stops: Iterable[str], patterns: Iterable[str]) -> None:
        self._automaton = automaton(tuple(stops), tuple(patterns))
        self._live: dict[int, int] = {}  # state -> where its match began, in order of that
        self._utf8 = _decoder("replace")
        self._char_at = 0  # where the character being read begins
        self.n_bytes = 0

    @property
    def held_from(self) -> int:
        """Where the text begins that may turn out to be part of a stop."""
        return next(iter(self._live.values()), self._char_at)

    def feed(self, data: bytes, *, count: bool = True) -> StopHit | None:
        """The first stop to be complete; feed nothing after it. `count`: False to let matches pass."""
        hit: StopHit | None = None
        for value in data:
            self.n_bytes += 1
            for char in self._utf8.decode(bytes((value,))):
                hit = hit or self._step(ord(char))
            if not self._utf8.getstate()[0]:
                self._char_at = self.n_bytes
            if hit is not None and count:
                return hit
            hit = None
        return None

    def _step(self, char: int) -> StopHit | None:
        machine, live = self._automaton, self._live
        for state in machine.opening:
            live.setdefault(state, self._char_at)
        self._live = after = machine.step(live, char)
        found = [(began, machine.names[state]) for state, began in after.items() if state in machine.names]
        if not found:
            return None
        began, name = min(found)
        return StopHit(name.encode(), began, self.n_bytes)


class ScannedFilter:
    """StopFilter's face over a scanner: bytes in, bytes that are safe to show out."""

    def __init__(self, stops: Iterable[str], patterns: Iterable[str], *, include_stop: bool = False) -> None:
        self._scanner = StopScanner(stops, patterns)
        self._include = include_stop
        self._held = b""
        self._shown = 0
        self.hit: bytes | None = None

    def push(self, data: bytes) -> bytes:
        if self.hit is not None:
            return b""
        found = self._scanner.feed(data)
        text, before = self._held + data, self._shown
        if found is not None:
            self.hit, self._held = found.stop, b""
            return text[: (found.end if self._include else found.start) - before]
        safe = self._scanner.held_from - before
        self._held, self._shown = text[safe:], before + safe
        return text[:safe]

    def finish(self) -> bytes:
        data, self._held = self._held, b""
        return data
