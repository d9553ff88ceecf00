"""Regular expressions over Unicode code points as values, and what both printers need to know of them.

A `Class` is one character out of sorted, disjoint, inclusive ranges; surrogates are never in it. `EMPTY` is the
empty string, `NOTHING` (a class of no characters) matches no text at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from runtime.grammar.work import matched, step

MAX_CHAR = 0x10FFFF
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Class:
    ranges: tuple[Range, ...]

    @property
    def single(self) -> int | None:
        """The code point of a one-character class."""
        if len(self.ranges) == 1 and self.ranges[0][0] == self.ranges[0][1]:
            return self.ranges[0][0]
        return None


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    items: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Regex
    low: int
    high: int | None  # None: no bound


Regex = Class | Seq | Alt | Repeat
EMPTY = Seq(())
NOTHING = Class(())


def ranges(pairs: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, merged ranges without surrogates."""
    merged: list[list[int]] = []
    for low, high in sorted(pairs):
        if low > high:
            continue
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return tuple(piece for low, high in merged for piece in _without_surrogates(low, high))


def _without_surrogates(low: int, high: int) -> Iterator[Range]:
    if low < 0xD800:
        yield low, min(high, 0xD7FF)
    if high > 0xDFFF:
        yield max(low, 0xE000), high


def chars(*parts: str | Range) -> Class:
    """A class of the characters of each string and of each inclusive range."""
    pairs: list[Range] = []
    for part in parts:
        pairs += [(ord(c), ord(c)) for c in part] if isinstance(part, str) else [part]
    return Class(ranges(pairs))


def complement(cls: Class) -> Class:
    pairs, start = [], 0
    for low, high in cls.ranges:
        pairs.append((start, low - 1))
        start = high + 1
    return Class(ranges([*pairs, (start, MAX_CHAR)]))


def intersect(a: Class, b: Class) -> Class:
    return Class(
        ranges((max(l1, l2), min(h1, h2)) for l1, h1 in a.ranges for l2, h2 in b.ranges if max(l1, l2) <= min(h1, h2))
    )


def subtract(a: Class, b: Class) -> Class:
    return intersect(a, complement(b))


ANY_CHAR = Class(ranges([(0, MAX_CHAR)]))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)
DIGIT = chars((0x30, 0x39))


def lit(text: str) -> Regex:
    return seq(*(Class(((ord(c), ord(c)),)) for c in text))


def seq(*items: Regex) -> Regex:
    """Concatenation, flattened."""
    step()
    flat: list[Regex] = []
    for item in items:
        flat += item.items if isinstance(item, Seq) else (item,)
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*items: Regex) -> Regex:
    """Alternation, flattened, without doubles; single-character branches merge into one class."""
    step()
    flat: dict[Regex, None] = {}
    pairs: list[Range] = []
    for item in items:
        for branch in item.items if isinstance(item, Alt) else (item,):
            if isinstance(branch, Class):
                pairs += branch.ranges
            else:
                flat[branch] = None
    merged = Class(ranges(pairs))
    branches: list[Regex] = ([merged] if merged.ranges else []) + list(flat)
    if not branches:
        return NOTHING
    return branches[0] if len(branches) == 1 else Alt(tuple(branches))


def repeat(item: Regex, low: int = 0, high: int | None = None) -> Regex:
    if high == 0 or item == EMPTY:
        return EMPTY
    if item == NOTHING:
        return EMPTY if low == 0 else NOTHING
    if low == high == 1:
        return item
    if isinstance(item, Repeat) and item.low == 0 and item.high is None and low <= 1:
        return item  # (x*)* and (x*)+
    return Repeat(item, low, high)


def opt(item: Regex) -> Regex:
    return repeat(item, 0, 1)


def lengths(regex: Regex) -> tuple[int, int | None]:
    """Fewest and most characters (None: no bound) a match can have."""
    match regex:
        case Class():
            return 1, 1
        case Seq(items):
            bounds = [lengths(i) for i in items]
            return sum(b[0] for b in bounds), _total(b[1] for b in bounds)
        case Alt(items):
            bounds = [lengths(i) for i in items]
            highs = [b[1] for b in bounds]
            return min(b[0] for b in bounds), None if None in highs else max(h for h in highs if h is not None)
        case Repeat(item, low, high):
            least, most = lengths(item)
            return least * low, 0 if most == 0 else (None if high is None or most is None else most * high)
    raise TypeError(regex)


def _total(highs: Iterable[int | None]) -> int | None:
    total = 0
    for high in highs:
        if high is None:
            return None
        total += high
    return total


def nested_repeat(regex: Regex) -> int:
    """Largest product of nested counted bounds: what unrolling the expression would cost."""
    match regex:
        case Class():
            return 1
        case Seq(items) | Alt(items):
            return max((nested_repeat(i) for i in items), default=1)
        case Repeat(item, low, high):
            return max(1, low if high is None else high) * nested_repeat(item)
    raise TypeError(regex)


def counted_depth(regex: Regex) -> int:
    """How deep counted repeats are nested."""
    match regex:
        case Class():
            return 0
        case Seq(items) | Alt(items):
            return max((counted_depth(i) for i in items), default=0)
        case Repeat(item, low, high):
            return counted_depth(item) + (max(low, high or 0) > 1)
    raise TypeError(regex)


def size(regex: Regex) -> int:
    """Nodes of the expression."""
    match regex:
        case Class():
            return 1
        case Seq(items) | Alt(items):
            return 1 + sum(size(i) for i in items)
        case Repeat(item, _, _):
            return 1 + size(item)
    raise TypeError(regex)


def none_of(words: Iterable[str], char: Class = ANY_CHAR) -> Regex:
    """Every text over `char` that is not one of `words`."""
    trie: dict[str, dict] = {}
    end = ""
    for word in words:
        node = trie
        for c in word:
            node = node.setdefault(c, {})
        node[end] = {}
    return _outside(trie, char)


def _outside(node: dict[str, dict], char: Class) -> Regex:
    children = {c: child for c, child in node.items() if c}
    known = chars("".join(children))
    branches: list[Regex] = [seq(lit(c), _outside(child, char)) for c, child in children.items()]
    branches.append(seq(subtract(char, known), repeat(char)))
    if "" not in node:
        branches.append(EMPTY)
    return alt(*branches)


def fullmatch(regex: Regex, text: str) -> bool:
    """Whether the whole text matches (sets of positions; no backtracking). Raises TooMuchWork within `bounded_work`."""
    return len(text) in _ends(regex, text, {0})


def _ends(regex: Regex, text: str, starts: set[int]) -> set[int]:
    matched(1 + len(starts))
    match regex:
        case Class(pairs):
            return {i + 1 for i in starts if i < len(text) and any(lo <= ord(text[i]) <= hi for lo, hi in pairs)}
        case Seq(items):
            for item in items:
                starts = _ends(item, text, starts)
            return starts
        case Alt(items):
            return set().union(*(_ends(i, text, starts) for i in items))
        case Repeat(item, low, high):
            return _repeat_ends(item, low, high, text, starts)
    raise TypeError(regex)


def _repeat_ends(item: Regex, low: int, high: int | None, text: str, starts: set[int]) -> set[int]:
    reached, seen, count = starts, set(starts) if low == 0 else set(), 0
    limit = low + len(text) + 1 if high is None else min(high, low + len(text) + 1)
    while reached and count < limit:
        reached, count = _ends(item, text, reached), count + 1
        if count >= low:
            if reached <= seen:
                break
            seen |= reached
    return seen
