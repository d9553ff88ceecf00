"""Ids of text between special tokens, remembered: agents send the same system prompt, tools and turns in every request.

A byte-level tokenizer cuts its text at special tokens first and treats each stretch between them for itself, so the
ids of a stretch do not depend on what stands around it. Tokenizers of which that is not certain are not helped.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

MAX_BYTES = 8 << 20
ENTRY_BYTES = 400  # what an entry takes beside its text and its ids
SHORTEST = 24  # characters; encoding less costs no more than looking it up


class Stretches:
    """`encode` of whole texts, stretch by stretch. Thread-safe; takes about `max_bytes` of memory."""

    def __init__(self, cut: re.Pattern[str], special: dict[str, int], max_bytes: int = MAX_BYTES) -> None:
        self._cut = cut
        self._special = special
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, backend: Backend, max_bytes: int = MAX_BYTES) -> Stretches | None:
        """None where the ids of a stretch may depend on its surroundings."""
        added = backend.get_added_tokens_decoder()
        plain = not any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added.values())
        if not added or not plain or backend.normalizer is not None or not _is_byte_level(backend.pre_tokenizer):
            return None
        special = {token.content: i for i, token in added.items()}
        longest_first = sorted(special, key=len, reverse=True)
        return cls(re.compile("(" + "|".join(map(re.escape, longest_first)) + ")"), special, max_bytes)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of `text`; `encode` is the tokenizer's own, without a beginning or an end added."""
        ids: list[int] = []
        for i, part in enumerate(self._cut.split(text)):
            if i % 2:
                ids.append(self._special[part])
            elif len(part) < SHORTEST:
                ids += encode(part) if part else ()
            else:
                ids += self._stretch(part, encode)
        return ids

    def _stretch(self, part: str, encode: Callable[[str], list[int]]) -> array[int]:
        with self._lock:
            known = self._known.get(part)
            if known is not None:
                self._known.move_to_end(part)
                return known
        made = array("i", encode(part))
        with self._lock:
            if part not in self._known:
                self._known[part] = made
                self._n_bytes += _size(part, made)
            while self._n_bytes > self._max_bytes:
                self._n_bytes -= _size(*self._known.popitem(last=False))
        return made


def _size(part: str, ids: array[int]) -> int:
    return ENTRY_BYTES + len(part) + 4 * len(ids)


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Whether every piece is cut from its own text alone: byte-level, and nothing put before the first word."""
    if pre_tokenizer is None:
        return False
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state.get("pretokenizers", [state])
    kinds = {step.get("type") for step in steps}
    puts_space = any(step.get("add_prefix_space") for step in steps)
    return "ByteLevel" in kinds and not puts_space and kinds <= {"ByteLevel", "Digits", "Split"}
