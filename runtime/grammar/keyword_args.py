"""An object's members as the keyword arguments of a Python call: `city="Rome", days=3`.

Values are written as JSON: Python reads its strings and numbers as JSON does, and our reader of calls knows `true`,
`false` and `null`. Keys that are not listed are never written, though the schema may allow them.
"""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Iterator
from typing import Any

from runtime.grammar.emit import FIXED, FLEXIBLE, Emitter
from runtime.grammar.nodes import Literal, Node, Object, TooComplex, Union, conj_all
from runtime.grammar.objects import Entries, object_body
from runtime.grammar.rules import NOTHING_FITS, ROOT, Expr, Grammar, Text, choice, join, prune
from runtime.grammar.schema import Normaliser, refuse


def keyword_grammar(schema: Any, whitespace: str) -> Grammar:
    """The grammar of what may stand between the parentheses."""
    try:
        spacing = FLEXIBLE if whitespace == "flexible" else FIXED
        grammar = prune(_Arguments(Normaliser(schema), spacing).document())
    except (TooComplex, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        refuse("", f"too complex: {why}.")
    if grammar.root == NOTHING_FITS:
        refuse("", "no keyword arguments can match this schema.")
    return grammar


def is_keyword_name(name: str) -> bool:
    """Whether Python takes it for the name of an argument and reads it as it stands."""
    plain = unicodedata.normalize("NFKC", name) == name
    return plain and name.isidentifier() and not keyword.iskeyword(name) and name != "__debug__"


class _Arguments(Emitter):
    def document(self) -> dict[str, Expr]:
        self._rules[ROOT] = choice(map(self._members, self._objects(self._root())))
        return self._rules

    def _objects(self, node: Node) -> Iterator[Object]:
        node = self.plain(node)
        if isinstance(node, Union):
            for part in node.nodes:
                yield from self._objects(part)
        elif isinstance(node, Literal) and any(isinstance(value, dict) for value in node.values):
            raise TooComplex("constant objects have no form as keyword arguments")
        elif isinstance(node, Object):
            yield node

    def _members(self, node: Object) -> Expr:
        fixed: list[tuple[Expr, bool]] = []
        for key in dict.fromkeys([*node.props, *sorted(node.required)]):
            value = self.expr(conj_all(node.key_nodes(key), self._resolve))
            need = key in node.required
            if value == NOTHING_FITS:
                if need:
                    return NOTHING_FITS
                continue
            if not is_keyword_name(key):
                refuse(f"{node.where}/properties", f"{key[:60]!r} is no name for an argument in Python's notation.")
            fixed.append((self.fresh(join(Text(f"{key}="), value)), need))
        try:
            return object_body(
                Entries(tuple(fixed), (), self._spacing.comma, node.min_props, node.max_props, node.where), self
            )
        except TooComplex as error:
            self._cannot(node, error)
