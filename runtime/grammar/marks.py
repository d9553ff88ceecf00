"""Markers inside structural tags: one control token where the vocabulary has one of that text, else its characters.

A marker that is a control token is never text: free text may not spell it either, or a reader of the text would take
the spelling for the marker.
"""

from __future__ import annotations

from typing import Any

from runtime.grammar.protocol import Vocabulary

NO_TEXT = b"\xff"  # no UTF-8 text has it, so a token that begins with it is met only by its id
_FREE = frozenset({"any_text", "triggered_tags"})


def resolve(document: Any, vocab: Vocabulary) -> tuple[Any, dict[int, bytes]]:
    """The structural tag without `marker` formats, and the control tokens that stand in it."""
    wanted = _texts(document)
    if not wanted:
        return document, {}
    ids = sorted(vocab.control_ids - set(vocab.stop_ids))
    found = {vocab.token_bytes[i].decode(errors="replace"): i for i in ids if i < len(vocab.token_bytes)}
    known = {text: found[text] for text in wanted if text in found}
    return _replaced(document, known), {i: text.encode() for text, i in known.items()}


def _texts(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_texts, node))
    if not isinstance(node, dict):
        return set()
    if node.get("type") == "marker":
        return {node["text"]}
    return set().union(*map(_texts, node.values()))


def _replaced(node: Any, known: dict[str, int]) -> Any:
    if isinstance(node, list):
        return [_replaced(item, known) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "marker":
        text = node["text"]
        return {"type": "token", "token": known[text]} if text in known else {"type": "const_string", "value": text}
    copy = {key: _replaced(value, known) for key, value in node.items()}
    if kind in _FREE:
        copy["excludes"] = list(dict.fromkeys([*node.get("excludes", ()), *known]))
    return copy
