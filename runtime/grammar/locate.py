"""Where in a schema document the keyword stands that a refusal speaks of.

A node of the normal form is merged from siblings, branches and references, and knows the place of the object it began
with. The keyword may stand there or in what was merged into it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from runtime.grammar.keywords import TYPED
from runtime.grammar.pointer import escape, lookup

MAX_PLACES = 1000  # that are looked at
_BRANCH = re.compile(r"/(?:(?:allOf|anyOf|oneOf)/\d+|then|else|if|not)$")
_WORD = re.compile(r"[A-Za-z$]+")
_MORE = ("format", "pattern", "enum", "const", "not", "oneOf", "if")
_SPOKEN = {  # what messages call several keywords
    "prefixItems": ("prefixItems", "items"),
    "items": (),  # of an array, as a word
    "keys": ("propertyNames", "patternProperties", "additionalProperties"),
    "range": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "excluded": ("not", "oneOf", "if", "dependentRequired"),
}
_LISTS, _SINGLE = ("allOf", "anyOf", "oneOf"), ("then", "else", "if", "not")


def keyword_place(document: Any, where: str, what: str) -> str:
    """The JSON pointer of the first keyword named in `what` that stands at `where` or in what is merged there; else of
    the nearest place above that exists."""
    place = lookup(document, where)
    while place is None and where:
        where = where.rpartition("/")[0]
        place = lookup(document, where)
    if not isinstance(place, dict):
        return where
    names = list(_names(what))
    for top in _tops(document, where, place):
        for at, schema in _merged(document, *top):
            for name in names:
                if name in schema:
                    return f"{at}/{name}"
    return where


def _tops(document: Any, where: str, place: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema, then those whose branch it is."""
    while isinstance(place, dict):
        yield where, place
        shorter = _BRANCH.sub("", where)
        if shorter == where:
            return
        where, place = shorter, lookup(document, shorter)


def _names(what: str) -> Iterator[str]:
    for word in _WORD.findall(what):
        if word in _SPOKEN:
            yield from _SPOKEN[word]
        elif word in TYPED or word in _MORE:
            yield word


def _merged(document: Any, where: str, place: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and those that its normal form is merged from, nearest first."""
    queue, seen = deque([(where, place)]), {id(place)}
    while queue and len(seen) <= MAX_PLACES:
        at, schema = queue.popleft()
        yield at, schema
        for pointer, part in _parts(document, at, schema):
            if isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                queue.append((pointer, part))


def _parts(document: Any, at: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        yield reference[1:], lookup(document, reference[1:])
    for keyword in _LISTS:
        branches = schema.get(keyword)
        for i, part in enumerate(branches if isinstance(branches, list) else ()):
            yield f"{at}/{keyword}/{i}", part
    for keyword in _SINGLE:
        yield f"{at}/{keyword}", schema.get(keyword)
    dependent = schema.get("dependentSchemas")
    for key, part in dependent.items() if isinstance(dependent, dict) else ():
        yield f"{at}/dependentSchemas/{escape(key)}", part
