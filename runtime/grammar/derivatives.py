"""What is left of a leaf after some of its characters (Brzozowski's derivatives)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from runtime.grammar.regular import EMPTY, NOTHING, Alt, Class, Regex, Repeat, Seq, alt, repeat, seq
from runtime.grammar.rules import Leaf

_KEPT = 1 << 11


class Residue(NamedTuple):
    """A text matches if it matches every one of `must` and none of `never`. Equal residues are one object, nearly
    always, so that comparing them is cheap."""

    must: tuple[Regex, ...]
    never: tuple[Regex, ...]


def residue_of(leaf: Leaf) -> Residue:
    return _residue((leaf.regex, *leaf.also), leaf.never)


@lru_cache(_KEPT)
def _residue(must: tuple[Regex, ...], never: tuple[Regex, ...]) -> Residue:
    return Residue(must, never)


@lru_cache(_KEPT)
def nullable(residue: Residue) -> bool:
    """Whether nothing more need follow."""
    return all(map(_nullable, residue.must)) and not any(map(_nullable, residue.never))


@lru_cache(_KEPT)
def borders(residue: Residue) -> Sequence[int]:
    """Code points at which `derive` may change, both ends of every class."""
    found: set[int] = set()
    stack: list[Regex] = [*residue.must, *residue.never]
    while stack:
        match stack.pop():
            case Class(pairs):
                for low, high in pairs:
                    found |= {low, high + 1}
            case Seq(items) | Alt(items):
                stack += items
            case Repeat(item, _, _):
                stack.append(item)
    return tuple(found)


def derive(residue: Residue, code: int) -> Residue | None:
    """What is left after one character; None if it does not fit."""
    must = tuple(_derive(r, code) for r in residue.must)
    if NOTHING in must:
        return None
    never = tuple(left for left in (_derive(r, code) for r in residue.never) if left != NOTHING)
    return _residue(must, never)


def _nullable(regex: Regex) -> bool:
    match regex:
        case Class():
            return False
        case Seq(items):
            return all(map(_nullable, items))
        case Alt(items):
            return any(map(_nullable, items))
        case Repeat(item, low, _):
            return low == 0 or _nullable(item)
    raise TypeError(regex)


def _derive(regex: Regex, code: int) -> Regex:
    match regex:
        case Class(pairs):
            return EMPTY if any(low <= code <= high for low, high in pairs) else NOTHING
        case Seq(items):
            branches = []
            for i, item in enumerate(items):
                branches.append(seq(_derive(item, code), *items[i + 1 :]))
                if not _nullable(item):
                    break
            return alt(*branches) if branches else NOTHING
        case Alt(items):
            return alt(*(_derive(i, code) for i in items))
        case Repeat(item, low, high):
            left = _derive(item, code)
            if left == NOTHING:
                return NOTHING
            return seq(left, repeat(item, max(0, low - 1), None if high is None else high - 1))
    raise TypeError(regex)
