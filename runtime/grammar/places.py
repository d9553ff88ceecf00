"""The places of a grammar, so that what an engine once found out about one is known wherever it comes up again.

Two texts lead to the same place if exactly the same texts may follow. Places are told apart by derivatives of the
grammar, character by character: what is left of the rules and leaves under way. Telling apart too much would only cost
time, so nothing here needs to be minimal. Masks come from an engine, once a place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from runtime.grammar.derivatives import Residue, borders, derive, nullable, residue_of
from runtime.grammar.distance import Distances
from runtime.grammar.protocol import MaskRow
from runtime.grammar.regular import Repeat
from runtime.grammar.rules import ROOT, Choice, Expr, Grammar, Join, Leaf, Many, Native, Rule, Text, leaves

MAX_WAYS = 64  # readings of one text that are followed at the same time
MAX_PLACES = 4096
MAX_LINKS = 1 << 16  # tokens that lead from one place to another
MAX_ROW_BYTES = 2 << 20
MAX_COUNT = 256  # longer counters have a place for each of their values, which hardly ever come up again
MAX_LEAF = 2000
UNKNOWN = -1
NEAR = 3  # characters that one token may add to end a text: quotes and brackets

Stack = tuple[Any, Any] | None  # (what comes first, what follows it); None: the end of the text


class Place:
    """`row`, `limited`, `complete`, `forced`: what an engine said here; None until it was asked. `last`: see
    `Cursor.last_token`; UNKNOWN until somebody looked."""

    __slots__ = (
        "_borders", "_next", "by_token", "complete", "forced", "last", "limited", "near_end", "pending", "row", "ways",
    )  # fmt: skip

    def __init__(self, ways: frozenset[Stack] | None, pending: bytes = b"") -> None:
        self.ways = ways  # None: not known, so this place is like no other
        self.pending = pending  # the first bytes of a character
        self.by_token: dict[int, Place] = {}
        self.row: MaskRow | None = None
        self.limited: bool | None = None
        self.complete: bool | None = None
        self.near_end: bool | None = None
        self.last: int | None = UNKNOWN
        self.forced: tuple[int, Sequence[int]] | None = None  # (limit asked for, tokens)
        self._borders: list[int] | None = None
        self._next: dict[int, Place | None] = {}

    def goes_on(self, unforced: bool) -> bool:
        """See `Cursor.goes_on`."""
        if self.complete is not False or self.near_end is not False or self.last is not None:
            return False
        return not unforced or (self.forced is not None and not self.forced[1])


class KeptRows:
    """Masks that may be kept; equal ones are one."""

    def __init__(self) -> None:
        self._rows: dict[bytes, MaskRow] = {}
        self.n_bytes = 0

    def keep(self, row: MaskRow) -> MaskRow:
        """A copy of the row."""
        data = row.tobytes()
        kept = self._rows.get(data)
        if kept is None:
            kept = self._rows[data] = row.copy()
            self.n_bytes += 2 * len(data)
        return kept


class Atlas:
    """The places of one compiled grammar. Shared by its cursors; bounded, and begun anew when it is full."""

    n_bytes = 256 << 10  # typically

    def __init__(self, grammar: Grammar, token_bytes: Sequence[bytes]) -> None:
        self._rules = grammar.rules
        self._pieces = token_bytes
        self._distances = Distances(grammar.rules)
        self.n_tokens = len(token_bytes)
        self._first = frozenset(self._open([(Rule(ROOT), None)]))
        self._clear()

    @property
    def useful(self) -> bool:
        return len(self._first) <= MAX_WAYS

    def _clear(self) -> None:
        self._places: dict[tuple[frozenset[Stack], bytes], Place] = {}
        self._rows = KeptRows()
        self._n_links = 0

    def start(self) -> Place:
        if len(self._places) > MAX_PLACES or self._rows.n_bytes > MAX_ROW_BYTES or self._n_links > MAX_LINKS:
            self._clear()
        return self._place(self._first, b"")

    def keep(self, row: MaskRow) -> MaskRow:
        """A copy of the row that may be kept."""
        return self._rows.keep(row)

    def after(self, place: Place, token: int) -> Place:
        """Where the token leads. A place like no other where that is not followed."""
        known = place.by_token.get(token)
        if known is None:
            known = self._walk(place, self._pieces[token])
            if known.ways is not None:
                place.by_token[token] = known
                self._n_links += 1
        return known

    def near_end(self, place: Place) -> bool:
        """Whether one more token may complete the text. False where nothing is known."""
        if place.near_end is None:
            known = place.ways is not None and not place.pending
            place.near_end = known and self._distances.to_the_end(place.ways or ()) <= NEAR
        return place.near_end

    def _walk(self, place: Place, piece: bytes) -> Place:
        if place.ways is None:
            return Place(None)
        text, pending = _characters(place.pending + piece)
        if text is None:
            return Place(None)
        at = self._place(place.ways, b"") if place.pending else place
        for char in text:
            found = self._step(at, ord(char))
            if found is None:
                return Place(None)
            at = found
        assert at.ways is not None
        return self._place(at.ways, pending) if pending else at

    def _step(self, place: Place, code: int) -> Place | None:
        assert place.ways is not None
        if place._borders is None:
            place._borders = sorted({b for stack in place.ways if stack is not None for b in _borders(stack[0])})
        interval = bisect_right(place._borders, code)
        if interval not in place._next:
            ways = self._open(list(_derived(place.ways, code)))
            place._next[interval] = self._place(frozenset(ways), b"") if 0 < len(ways) <= MAX_WAYS else None
        return place._next[interval]

    def _place(self, ways: frozenset[Stack], pending: bytes) -> Place:
        key = (ways, pending)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(ways, pending)
        return place

    def _open(self, stacks: list[Stack]) -> set[Stack]:
        """Every reading with a literal or a leaf in front, or at the end of the text."""
        found: set[Stack] = set()
        seen: set[Stack] = set()
        while stacks:
            stack = stacks.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if stack is None or (isinstance(stack[0], str) and stack[0]):
                found.add(stack)
            elif isinstance(stack[0], Residue):
                found.add(stack)
                if nullable(stack[0]):
                    stacks.append(stack[1])
            else:
                stacks.extend(self._opened(stack[0], stack[1]))
        return found

    def _opened(self, first: Expr | str, rest: Stack) -> list[Stack]:
        match first:
            case str():
                return [rest]
            case Text(text):
                return [(text, rest)]
            case Leaf():
                return [(residue_of(first), rest)]
            case Rule(name):
                return [(self._rules[name], rest)]
            case Join(items):
                for item in reversed(items):
                    rest = (item, rest)
                return [rest]
            case Choice(items):
                return [(item, rest) for item in items]
            case Many(item, low, high):
                more: Stack = rest
                if high is None or high > 1:
                    more = (Many(item, max(0, low - 1), None if high is None else high - 1), rest)
                return [(item, more), *([rest] if low == 0 else [])]
        raise TypeError(first)


def atlas_of(grammar: Grammar | None, token_bytes: Sequence[bytes]) -> Atlas | None:
    """None for grammars that are not followed: those an engine reads by itself, and long counters."""
    if grammar is None:
        return None
    for leaf in {id(leaf): leaf for leaf in leaves(grammar)}.values():
        if isinstance(leaf, Native) or any(_long(r) for r in (leaf.regex, *leaf.also, *leaf.never)):
            return None
    atlas = Atlas(grammar, token_bytes)
    return atlas if atlas.useful else None


def _long(regex: Any) -> bool:
    stack, n = [regex], 0
    while stack:
        one = stack.pop()
        n += 1
        if n > MAX_LEAF or (isinstance(one, Repeat) and max(one.low, one.high or 0) > MAX_COUNT):
            return True
        if isinstance(one, Repeat):
            stack.append(one.item)
        else:
            stack += getattr(one, "items", ())
    return False


def _borders(first: Any) -> Iterator[int] | Sequence[int]:
    """Code points at which the derivative may change."""
    if isinstance(first, str):
        return (ord(first[0]), ord(first[0]) + 1)
    return borders(first)


def _derived(ways: frozenset[Stack], code: int) -> Iterator[Stack]:
    for stack in ways:
        if stack is None:
            continue
        first, rest = stack
        if isinstance(first, str):
            if ord(first[0]) == code:
                yield (first[1:], rest)
        else:
            left = derive(first, code)
            if left is not None:
                yield (left, rest)


def _characters(data: bytes) -> tuple[str | None, bytes]:
    """The whole characters of `data`, and the first bytes of one that is cut. (None, ..): no UTF-8."""
    for cut in range(min(4, len(data) + 1)):
        whole, rest = data[: len(data) - cut], data[len(data) - cut :]
        if rest and not 0xC2 <= rest[0] <= 0xF4:
            continue  # a character does not begin here
        try:
            return whole.decode(), rest
        except UnicodeDecodeError:
            continue
    return None, b""
