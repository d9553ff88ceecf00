"""The inside of an object: listed entries in order, each required or not, then entries with other keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.grammar.nodes import TooComplex
from runtime.grammar.rules import EMPTY_TEXT, NOTHING_FITS, Expr, choice, join, many, optional

MAX_COUNTED_ENTRIES = 64


class Rules(Protocol):
    """Where shared expressions become rules."""

    def fresh(self, expr: Expr) -> Expr: ...


@dataclass(frozen=True, slots=True)
class Entries:
    """`fixed`: (entry, required), in order. `others`: alternatives for any further entry."""

    fixed: tuple[tuple[Expr, bool], ...]
    others: tuple[Expr, ...]
    comma: Expr
    low: int
    high: int | None
    where: str


def object_body(entries: Entries, rules: Rules) -> Expr:
    """What may stand between the braces."""
    required = sum(need for _, need in entries.fixed)
    counted = entries.low > required or (
        entries.high is not None and (bool(entries.others) or entries.high < len(entries.fixed))
    )
    if entries.high is not None and entries.high < required:
        return NOTHING_FITS
    if counted:
        return _Counted(entries, rules).body()
    other = rules.fresh(choice(entries.others)) if entries.others else NOTHING_FITS
    return _first(entries, other, _tails(entries, other, rules))


def _tails(entries: Entries, other: Expr, rules: Rules) -> list[Expr]:
    """tails[i]: what may follow once something was written, from listed entry i on."""
    tail = many(join(entries.comma, other))
    tails = [tail]
    for entry, need in reversed(entries.fixed):
        step = join(entries.comma, entry)
        tail = rules.fresh(join(step if need else optional(step), tail))
        tails.append(tail)
    return tails[::-1]


def _first(entries: Entries, other: Expr, tails: list[Expr]) -> Expr:
    """The first entry may be any up to the first required one; with none required the object may be empty."""
    starts: list[Expr] = []
    for i, (entry, need) in enumerate(entries.fixed):
        starts.append(join(entry, tails[i + 1]))
        if need:
            return choice(starts)
    if other != NOTHING_FITS:
        starts.append(join(other, tails[-1]))
    return choice([*starts, EMPTY_TEXT])


class _Counted:
    """minProperties or maxProperties matter: one rule for each (next entry, entries written)."""

    def __init__(self, entries: Entries, rules: Rules) -> None:
        self._entries = entries
        self._rules = rules
        self._other = rules.fresh(choice(entries.others)) if entries.others else NOTHING_FITS
        self._known: dict[tuple[int, int], Expr] = {}
        open_ended = self._other != NOTHING_FITS
        if open_ended and entries.low > max(1, sum(need for _, need in entries.fixed)):
            raise TooComplex("minProperties above 1 beside free keys, which a text could repeat,")
        most = entries.low if entries.high is None else entries.high
        if len(entries.fixed) > MAX_COUNTED_ENTRIES or most > MAX_COUNTED_ENTRIES:
            raise TooComplex(f"minProperties or maxProperties with more than {MAX_COUNTED_ENTRIES} entries")

    def body(self) -> Expr:
        return self._from(0, 0)

    def _from(self, index: int, written: int) -> Expr:
        if (index, written) not in self._known:
            self._known[index, written] = self._rules.fresh(self._make(index, written))
        return self._known[index, written]

    def _make(self, index: int, written: int) -> Expr:
        entries = self._entries
        full = entries.high is not None and written >= entries.high
        separator = entries.comma if written else EMPTY_TEXT
        if index == len(entries.fixed):
            ends = EMPTY_TEXT if written >= entries.low else NOTHING_FITS
            more = NOTHING_FITS if full else self._more(index, written, separator)
            return choice(part for part in (ends, more) if part != NOTHING_FITS)
        entry, need = entries.fixed[index]
        take = NOTHING_FITS if full else join(separator, entry, self._from(index + 1, written + 1))
        skip = NOTHING_FITS if need else self._from(index + 1, written)
        return choice(part for part in (take, skip) if part != NOTHING_FITS)

    def _more(self, index: int, written: int, separator: Expr) -> Expr:
        if self._other == NOTHING_FITS:
            return NOTHING_FITS
        if self._entries.high is None and written >= self._entries.low:
            rest = many(join(self._entries.comma, self._other))
            return join(separator, self._other, rest)
        return join(separator, self._other, self._from(index, written + 1))
