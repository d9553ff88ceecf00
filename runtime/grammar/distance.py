"""How many characters a text under some rules needs at least: whether one more token may end it, and whether what is
forced is short, being the beginning of every text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from runtime.grammar.derivatives import Residue
from runtime.grammar.regular import Alt, Class, Regex, Repeat, Seq, lengths
from runtime.grammar.rules import Choice, Expr, Grammar, Join, Leaf, Many, Rule, Text

FAR = 8  # distances from here on are all alike
SHORT = 4096  # characters that an engine writes out in some milliseconds
_KEPT = 1 << 11


class Distances:
    """Of what may still stand in a text under some rules. Looked up rule by rule, when somebody asks."""

    def __init__(self, rules: Mapping[str, Expr]) -> None:
        self._rules = rules
        self._of_rule: dict[str, int] = {}

    def to_the_end(self, ways: Iterable[Any]) -> int:
        """The least of several stacks: (what comes first, what follows it), None where the text is complete."""
        return min((self._along(stack) for stack in ways), default=FAR)

    def _along(self, stack: Any) -> int:
        missing = 0
        while stack is not None and missing < FAR:
            first, stack = stack
            missing += self._of(first)
        return min(missing, FAR)

    def _of(self, first: Any) -> int:
        match first:
            case str(text) | Text(text):
                return len(text)
            case Leaf():
                return max(map(shortest, (first.regex, *first.also)))
            case Residue():
                return max(map(shortest, first.must))
            case Rule(name):
                return self._rule(name)
            case Join(items):
                return sum(map(self._of, items))
            case Choice(items):
                return min(map(self._of, items), default=FAR)
            case Many(item, low, _):
                return min(FAR, low * self._of(item)) if low else 0
        return FAR

    def _rule(self, name: str) -> int:
        if name not in self._of_rule:
            self._of_rule[name] = FAR  # what a rule needs of itself is never the shortest
            self._of_rule[name] = min(FAR, self._of(self._rules[name]))
        return self._of_rule[name]


def forces_little(grammar: Grammar) -> bool:
    """Whether no part of the grammar needs more than SHORT characters, so that no forced text is long."""
    rules = grammar.rules
    least = dict.fromkeys(rules, SHORT + 1)
    names = list(rules)
    changed = True
    while changed:
        changed = False
        names.reverse()  # what a rule refers to stands before it or behind it, so either way few passes do
        for name in names:
            found = _least(rules[name], least)
            if found < least[name]:
                least[name] = found
                changed = True
    return all(_least(part, least) <= SHORT for expr in rules.values() for part in _parts(expr))


def _parts(expr: Expr) -> Iterator[Expr]:
    stack = [expr]
    while stack:
        part = stack.pop()
        yield part
        match part:
            case Join(items) | Choice(items):
                stack += items
            case Many(item, low, _) if low:
                stack.append(item)


def _least(expr: Expr, of_rule: Mapping[str, int]) -> int:
    match expr:
        case Text(text):
            return min(SHORT + 1, len(text))
        case Leaf():
            return min(SHORT + 1, max(lengths(r)[0] for r in (expr.regex, *expr.also)))
        case Rule(name):
            return of_rule[name]
        case Join(items):
            return min(SHORT + 1, sum(_least(i, of_rule) for i in items))
        case Choice(items):
            return min((_least(i, of_rule) for i in items), default=SHORT + 1)
        case Many(item, low, _):
            return min(SHORT + 1, low * _least(item, of_rule))
    return SHORT + 1


@lru_cache(_KEPT)
def shortest(regex: Regex) -> int:
    """Characters of the shortest match."""
    match regex:
        case Class():
            return 1
        case Seq(items):
            return min(FAR, sum(map(shortest, items)))
        case Alt(items):
            return min(map(shortest, items), default=FAR)
        case Repeat(item, low, _):
            return min(FAR, low * shortest(item)) if low else 0
    raise TypeError(regex)
