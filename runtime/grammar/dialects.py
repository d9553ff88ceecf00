"""What the drafts of JSON Schema mean by their words. A schema that declares its draft with `$schema` is read as that
draft, in which the words of other drafts are annotations; one that declares none as the union of them.

A keyword that one draft writes in another shape (a flag for a bound, an array for a schema) is refused where the
declared draft does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest

PARAM = "json_schema"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`words`: what says something of validity (None: any). `lone_ref`: siblings of `$ref` say nothing.
    `anchor`: the word that names a place, and what stands before the name. `identity`: that of a document's name."""

    name: str
    words: frozenset[str] | None = None
    lone_ref: bool = False
    bound_flags: bool = True
    bound_numbers: bool = True
    tuple_items: bool = True
    anchor: tuple[str, str] = ("$anchor", "")
    identity: str = "$id"
    refused: bool = False

    def read(self, schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """The schema without what says nothing in this draft. Raises InvalidRequest for another draft's shapes."""
        if self.refused:
            self._refuse(f"{where}/$schema", "one of the drafts 4 to 2020-12, not")
        if self.words is None:
            return schema
        if self.lone_ref and schema.get("$ref") is not None:
            return {"$ref": schema["$ref"]}
        known = {word: value for word, value in schema.items() if word in self.words}
        for word in ("exclusiveMinimum", "exclusiveMaximum"):
            flag = isinstance(known.get(word), bool)
            if word in known and not (self.bound_flags if flag else self.bound_numbers):
                self._refuse(f"{where}/{word}", "a number in" if flag else "a boolean in")
        if isinstance(known.get("items"), list) and not self.tuple_items:
            self._refuse(f"{where}/items", "a schema in")
        if self.bound_flags:
            known = _with_strict_bounds(known)
        return known

    def anchors(self, schema: Mapping[str, Any], fragment: str) -> bool:
        """Whether a reference to '#fragment' means this schema."""
        word, before = self.anchor
        return schema.get(word) == before + fragment

    def is_document(self, schema: Mapping[str, Any]) -> bool:
        """Whether it says that references in it start from itself. Draft 4's word is common where no references are."""
        name = schema.get(self.identity)
        if name is None or (self.lone_ref and schema.get("$ref") is not None):
            return False
        only_named = self.anchor[0] == self.identity and isinstance(name, str) and name.startswith("#")
        return not only_named and (self.identity == "$id" or _refers(schema))

    def _refuse(self, where: str, shape: str) -> None:
        raise InvalidRequest(f"JSON schema at '{where}': must be {shape} {self.name}.", param=PARAM)


def _with_strict_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Draft 4's flags in the words of later drafts."""
    result = dict(schema)
    for plain, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if result.pop(strict, False) and plain in result:
            result[strict] = result.pop(plain)
    return result


def _refers(schema: Any) -> bool:
    """Whether there is a reference in it."""
    stack = [schema]
    while stack:
        place = stack.pop()
        if isinstance(place, dict) and isinstance(place.get("$ref"), str):
            return True
        stack += place.values() if isinstance(place, dict) else place if isinstance(place, list) else ()
    return False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DRAFT_4 = _words(
    "$ref type enum format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern "
    "items additionalItems minItems maxItems uniqueItems properties required additionalProperties patternProperties "
    "minProperties maxProperties dependencies allOf anyOf oneOf not"
)
_DRAFT_6 = _DRAFT_4 | {"const", "contains", "propertyNames"}
_DRAFT_7 = _DRAFT_6 | {"if", "then", "else"}
_DRAFT_2019 = (_DRAFT_7 - {"dependencies"}) | _words(
    "$recursiveRef dependentRequired dependentSchemas minContains maxContains unevaluatedItems "
    "unevaluatedProperties contentSchema"
)
_DRAFT_2020 = (_DRAFT_2019 - {"$recursiveRef", "additionalItems"}) | {"$dynamicRef", "prefixItems"}

ANY = Dialect("any draft")
_OLD: dict[str, Any] = {"lone_ref": True, "bound_flags": False, "anchor": ("$id", "#")}
_DRAFTS = {
    "json-schema.org/draft-03/schema": Dialect("draft-03", refused=True),
    "json-schema.org/draft-04/schema": Dialect(
        "draft-04", _DRAFT_4, lone_ref=True, bound_numbers=False, anchor=("id", "#"), identity="id"
    ),
    "json-schema.org/draft-06/schema": Dialect("draft-06", _DRAFT_6, **_OLD),
    "json-schema.org/draft-07/schema": Dialect("draft-07", _DRAFT_7, **_OLD),
    "json-schema.org/draft/2019-09/schema": Dialect("2019-09", _DRAFT_2019, bound_flags=False),
    "json-schema.org/draft/2020-12/schema": Dialect("2020-12", _DRAFT_2020, bound_flags=False, tuple_items=False),
}


class Dialects:
    """The dialect of every schema of a document: that of the nearest `$schema` around it."""

    def __init__(self, document: Any) -> None:
        self._inner: dict[int, Dialect] = {}
        self._root = _declared(document) or ANY
        stack = [(document, self._root)]
        while stack:
            place, dialect = stack.pop()
            if isinstance(place, dict):
                dialect = _declared(place) or dialect
                if dialect is not self._root:
                    self._inner[id(place)] = dialect
                stack += ((part, dialect) for part in place.values() if isinstance(part, (dict, list)))
            elif isinstance(place, list):
                stack += ((part, dialect) for part in place if isinstance(part, (dict, list)))

    def of(self, schema: Mapping[str, Any]) -> Dialect:
        return self._inner.get(id(schema), self._root)

    def read(self, schema: Any, where: str) -> Any:
        """What a schema of the document says in its dialect."""
        return self.of(schema).read(schema, where) if isinstance(schema, dict) else schema


def _declared(schema: Any) -> Dialect | None:
    """The draft that `$schema` names; None where it names none that is known."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(uri, str):
        return None
    return _DRAFTS.get(uri.removesuffix("#").removeprefix("https://").removeprefix("http://"))
