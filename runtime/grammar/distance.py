"""How many characters are missing at least before a text is complete: whether one more token may end it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from runtime.grammar.derivatives import Residue
from runtime.grammar.regular import Alt, Class, Regex, Repeat, Seq
from runtime.grammar.rules import Choice, Expr, Join, Leaf, Many, Rule, Text

FAR = 8  # distances from here on are all alike
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
