"""Structural tags: free text in which some markers switch a grammar on. Read in xgrammar's format.

Every JSON schema and regular expression inside is replaced by our own grammar for it, so a tool's parameters are
enforced as exactly as a response format. The older `{"structures": [...], "triggers": [...]}` form is read too.
Two formats are ours: `marker` (see `marks`) and `keyword_arguments`, an object as the arguments of a call in Python.
"""

from __future__ import annotations

import json
from typing import Any

from runtime.errors import InvalidRequest
from runtime.grammar.emit import schema_grammar
from runtime.grammar.keyword_args import keyword_grammar
from runtime.grammar.limits import Limits, reject
from runtime.grammar.printers import CannotPrint, to_ebnf
from runtime.grammar.regex import RegexError, parse_full
from runtime.grammar.rules import ROOT, Grammar, Leaf

PARAM = "structural_tag"
MAX_TAGS = 256
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_FORMATS = frozenset(
    {
        "const_string", "json_schema", "any_text", "regex", "grammar", "sequence", "or", "tag", "triggered_tags",
        "tags_with_separator", "optional", "plus", "star", "repeat", "marker", "keyword_arguments",
    }
)  # fmt: skip
_CHILDREN = ("content", "elements", "tags", "format")
_COUNTED = ("max_chars", "max_tokens")  # of free text: xgrammar counts with a state for each


def rewrite(document: Any, whitespace: str, limits: Limits) -> tuple[str, list[Grammar] | None]:
    """The structural tag with our grammars in place of its schemas, and those grammars (None: it brings its own too).

    Raises InvalidRequest with a JSON pointer.
    """
    if not isinstance(document, dict):
        reject("structural_tag must be an object.", PARAM)
    if "structures" in document:
        document = {"type": PARAM, "format": _from_structures(document)}
    if not isinstance(document.get("format"), dict):
        reject("structural_tag at '/format': must be an object.", PARAM)
    rewriter = _Rewriter(whitespace, limits)
    text = json.dumps({"type": PARAM, "format": rewriter.format(document["format"], "/format")}, default=float)
    return text, None if rewriter.foreign else rewriter.grammars


def check_content(content: dict[str, Any]) -> None:
    """Raise InvalidRequest for one format that no tag can hold; the message names the place inside its schema."""
    try:
        rewrite({"format": content}, "fixed", Limits())
    except InvalidRequest as error:
        raise InvalidRequest(str(error).removeprefix("structural_tag at '/format': "), param=PARAM) from None


def _from_structures(document: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = document.get("structures"), document.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        reject("structural_tag: 'structures' and 'triggers' must be arrays.", PARAM)
    tags = []
    for i, item in enumerate(structures):
        if not isinstance(item, dict) or not {"begin", "end"} <= item.keys():
            reject(f"structural_tag at '/structures/{i}': needs 'begin', 'schema' and 'end'.", PARAM)
        content = {"type": "json_schema", "json_schema": item.get("schema", True)}
        tags.append({"begin": item["begin"], "content": content, "end": item["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Rewriter:
    def __init__(self, whitespace: str, limits: Limits) -> None:
        self._whitespace = whitespace
        self._limits = limits
        self._n_tags = 0
        self.grammars: list[Grammar] = []
        self.foreign = False

    def format(self, node: Any, where: str, depth: int = 0, times: int = 1) -> dict[str, Any]:
        """`times`: how often all repeats around it write it out."""
        if not isinstance(node, dict):
            reject(f"structural_tag at '{where}': must be an object.", PARAM)
        kind = node.get("type", "tag" if "begin" in node else None)
        if not isinstance(kind, str) or kind not in _FORMATS:
            reject(f"structural_tag at '{where}/type': unknown format {str(kind)[:40]!r}.", PARAM)
        if depth > 16:
            reject(f"structural_tag at '{where}': nested more than 16 deep.", PARAM)
        if kind == "tag":
            self._n_tags += 1
            if self._n_tags > MAX_TAGS:
                reject(f"structural_tag: more than {MAX_TAGS} tags.", PARAM)
        self.foreign |= kind in ("grammar", "repeat") or any(node.get(key) is not None for key in _COUNTED)
        if kind in ("json_schema", "keyword_arguments"):
            return self._schema(node.get("json_schema", True), where, keywords=kind == "keyword_arguments")
        if kind == "marker" and not (isinstance(node.get("text"), str) and node["text"]):
            reject(f"structural_tag at '{where}/text': must be a non-empty string.", PARAM)
        if kind == "regex":
            return self._regex(node.get("pattern"), where)
        self._check(kind, node, where)
        if kind == "repeat":
            times *= max(1, node["min"], node["max"])
            if times > self._limits.nested_repeat:
                reject(
                    f"structural_tag at '{where}': repeated more than {self._limits.nested_repeat} times in all.", PARAM
                )
        children = {key: self._child(node[key], f"{where}/{key}", depth, times) for key in node if key in _CHILDREN}
        return {**node, "type": kind, **children}

    def _check(self, kind: str, node: dict[str, Any], where: str) -> None:
        """Refuse what an engine of grammars would be slow to refuse, or would not."""
        if kind == "const_string" and not isinstance(node.get("value"), str):
            reject(f"structural_tag at '{where}/value': must be a string.", PARAM)
        if kind in ("sequence", "or") and not (isinstance(node.get("elements"), list) and node["elements"]):
            reject(f"structural_tag at '{where}/elements': must be a non-empty array.", PARAM)
        if kind in ("optional", "plus", "star", "repeat", "tag") and "content" not in node:
            reject(f"structural_tag at '{where}/content': is missing.", PARAM)
        counts = [(key, node.get(key)) for key in (("min", "max") if kind == "repeat" else _COUNTED)]
        for key, count in counts:
            if count is None and kind != "repeat":
                continue
            least = -1 if key == "max" else 0  # -1: no end
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                reject(f"structural_tag at '{where}/{key}': must be an integer of at least {least}.", PARAM)
            if count > self._limits.nested_repeat:
                reject(f"structural_tag at '{where}/{key}': must be {self._limits.nested_repeat} at most.", PARAM)
        if kind == "repeat" and -1 < node["max"] < node["min"]:
            reject(f"structural_tag at '{where}/max': must not be below min.", PARAM)

    def _child(self, value: Any, where: str, depth: int, times: int) -> Any:
        if isinstance(value, list):
            return [self.format(v, f"{where}/{i}", depth + 1, times) for i, v in enumerate(value)]
        return self.format(value, where, depth + 1, times)

    def _schema(self, schema: Any, where: str, *, keywords: bool) -> dict[str, Any]:
        make = keyword_grammar if keywords else schema_grammar
        try:
            self._limits.check_schema(schema, PARAM)
            grammar = make(_NO_ARGUMENTS if schema is None else schema, self._whitespace)
        except InvalidRequest as error:
            reject(f"structural_tag at '{where}': {error}", PARAM)
        return self._ebnf(grammar, where)

    def _regex(self, pattern: Any, where: str) -> dict[str, Any]:
        if not isinstance(pattern, str) or len(pattern) > self._limits.regex_bytes:
            reject(f"structural_tag at '{where}/pattern': must be a string of at most 2 KiB.", PARAM)
        try:
            return self._ebnf(Grammar({ROOT: Leaf(parse_full(pattern), what="this regular expression")}), where)
        except RegexError as error:
            reject(f"structural_tag at '{where}/pattern': {error}.", PARAM)

    def _ebnf(self, grammar: Grammar, where: str) -> dict[str, Any]:
        self.grammars.append(grammar)
        try:
            return {"type": "grammar", "grammar": to_ebnf(grammar, narrow=True)}
        except CannotPrint as error:
            reject(
                f"structural_tag at '{where}': JSON schema at '{error.where or '/'}': {error.what} cannot be enforced "
                "inside a tag: xgrammar cannot, and llguidance, which can, reads no tags.",
                PARAM,
            )
