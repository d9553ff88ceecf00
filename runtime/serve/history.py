"""Append-only history: what the model really wrote, put back when the conversation goes on.

A client sends an answer back as text. Re-tokenised, it may give other ids than the model chose, and all
cached KV after it is lost. So the ids of recent answers are kept under their whole text, prompt included;
when a new prompt begins with such a text, the kept ids are spliced in. Tool calls come back as parsed
objects, so their original text is kept as well, under the call's id.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ANSWERS = 4096
MAX_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class _Kept:
    """All ids up to the end of an answer, and the text they stand for."""

    text: str
    ids: tuple[int, ...]


class AnswerHistory:
    """Bounded by answers and by tokens. Used by one event loop. `marks`: texts that can follow an answer."""

    def __init__(self, marks: Sequence[str] = (), max_answers: int = MAX_ANSWERS, max_tokens: int = MAX_TOKENS) -> None:
        self._marks = [mark for mark in marks if mark]
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self._answers: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        self._calls: OrderedDict[tuple[str, str], tuple[str, list[Any]]] = OrderedDict()
        self._n_tokens = 0
        self.n_spliced = 0

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, owner: str, text: str, ids: tuple[int, ...]) -> None:
        """Remember a conversation up to the end of an answer, without the token that ended it."""
        key = (owner, _digest(text.encode()))
        self._forget(key)
        self._answers[key] = _Kept(text, ids)
        self._n_tokens += len(ids)
        while self._answers and (len(self._answers) > self._max_answers or self._n_tokens > self._max_tokens):
            self._forget(next(iter(self._answers)))

    def encode(self, owner: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of a rendered chat: those of the longest kept conversation it begins with, the rest encoded."""
        kept = self._longest(owner, text)
        if kept is None:
            return encode(text)
        self.n_spliced += 1
        return [*kept.ids, *encode(text[len(kept.text) :])]

    def keep_calls(self, owner: str, ids: Sequence[str], calls: list[Any], raw: str) -> None:
        """Remember the text in which these calls were written."""
        self._calls[(owner, ids[0])] = (raw, calls)
        while len(self._calls) > self._max_answers:
            self._calls.popitem(last=False)

    def raw_calls(self, owner: str, first_id: str, calls: list[Any]) -> str | None:
        """The text in which the model wrote exactly these calls, if it is still known."""
        raw, known = self._calls.get((owner, first_id), ("", None))
        return raw if known == calls else None

    def _longest(self, owner: str, text: str) -> _Kept | None:
        """One pass over the text: each place where an answer may have ended is looked up by the digest so far."""
        if not self._answers:
            return None
        best: _Kept | None = None
        state = hashlib.blake2b(digest_size=16)
        before = 0
        for end in self._ends(text):
            state.update(text[before:end].encode())
            before = end
            kept = self._answers.get((owner, state.copy().digest()))
            if kept is not None and text.startswith(kept.text):
                best = kept
        if best is not None:
            self._answers.move_to_end((owner, _digest(best.text.encode())))
        return best

    def _ends(self, text: str) -> list[int]:
        found = set()
        for mark in self._marks:
            at = text.find(mark)
            while at >= 0:
                found.add(at)
                at = text.find(mark, at + 1)
        return sorted(found)

    def _forget(self, key: tuple[str, bytes]) -> None:
        kept = self._answers.pop(key, None)
        if kept is not None:
            self._n_tokens -= len(kept.ids)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
