"""Forced text found byte by byte, for grammars in which an engine that looks for all of it at once may never return.

What is forced is a prefix of every completion, so where some part of a grammar needs a very long text, or none ever
completes it, so does what is forced. An engine writes it all out before anybody can cut it.
"""

from __future__ import annotations

import time

import numpy as np

from runtime.grammar.cursor import Matcher
from runtime.grammar.pieces import Pieces
from runtime.grammar.places import Place
from runtime.grammar.protocol import MaskRow

MAX_BYTES = 64
ENOUGH_S = 0.005  # a run that is cut is found on from there the next time, to the same tokens


class StepwiseMatcher:
    """An engine's matcher whose masks tell what is forced."""

    __slots__ = ("_inner", "_pieces")

    def __init__(self, inner: Matcher, pieces: Pieces) -> None:
        self._inner = inner
        self._pieces = pieces

    @property
    def complete(self) -> bool:
        return self._inner.complete

    @property
    def remembered(self) -> MaskRow | None:
        return self._inner.remembered

    @property
    def near_end(self) -> bool:
        return self._inner.near_end

    @property
    def place(self) -> Place | None:
        return self._inner.place

    def mask(self, row: MaskRow) -> bool:
        return self._inner.mask(row)

    def advance(self, token: int) -> bool:
        return self._inner.advance(token)

    def rollback(self, n: int) -> None:
        self._inner.rollback(n)

    def fork(self) -> StepwiseMatcher:
        return StepwiseMatcher(self._inner.fork(), self._pieces)

    def failure(self) -> str | None:
        return self._inner.failure()

    def forced(self, limit: int) -> list[int]:
        inner, data = self._inner, bytearray()
        row = np.zeros(self._pieces.n_words, np.int32)
        until = time.monotonic() + ENOUGH_S
        while len(data) < MAX_BYTES and time.monotonic() < until and not inner.complete and inner.mask(row):
            byte = self._pieces.only_byte(row)
            token = self._pieces.split(byte) if byte is not None else []
            if byte is None or not token or not inner.advance(token[0]):
                break
            data += byte
        if data:
            inner.rollback(len(data))
        return self._pieces.stable(bytes(data), limit)
