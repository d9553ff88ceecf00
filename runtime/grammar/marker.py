"""Free text up to a marker (the end of thinking), then a grammar.

The marker is looked for in bytes, so it may be one token, several, or end inside one. A token that completes it may
carry nothing more than line breaks (the answer's grammar starts on a token of its own); line breaks right after the
marker, at most four, belong to neither part. While the text is free only stop ids are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.grammar.pieces import packed_row
from runtime.grammar.protocol import Cursor, MaskRow, Vocabulary

MAX_GAP = 4
_GAP = b"\n"


class Marker:
    """One marker over one vocabulary. Rows are made when first needed and shared by all requests."""

    def __init__(self, vocab: Vocabulary, text: str) -> None:
        self._pieces = vocab.token_bytes
        self._stops = frozenset(vocab.stop_ids)
        self.words = text.encode()
        self._vocab_size = vocab.vocab_size
        self._rows: dict[bytes, MaskRow] = {}
        self._enders = [i for i, piece in enumerate(self._pieces) if self.words[-1:] in piece]
        self._free_row = packed_row(set(range(len(self._pieces))) - self._stops, vocab.vocab_size)
        self.gap_ids = tuple(i for i, p in enumerate(self._pieces) if p and not p.strip(_GAP) and len(p) <= MAX_GAP)

    def piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def is_stop(self, token: int) -> bool:
        return token in self._stops

    def tail(self, seen: bytes) -> bytes:
        """The longest end of `seen` that could grow into the marker."""
        start = max(0, len(seen) - len(self.words) + 1)
        while start < len(seen) and not self.words.startswith(seen[start:]):
            start += 1
        return seen[start:]

    def rest(self, tail: bytes, piece: bytes) -> bytes | None:
        """What a piece carries beyond the marker, None if the marker is not complete after it."""
        at = (tail + piece).find(self.words)
        return None if at < 0 else (tail + piece)[at + len(self.words) :]

    def row(self, tail: bytes) -> MaskRow:
        """The allowed tokens after `tail`: all but stop ids and those that would carry answer text with the marker."""
        if tail not in self._rows:
            rests = ((token, self.rest(tail, self._pieces[token])) for token in self._enders)
            spilling = [token for token, rest in rests if rest is not None and not gap_fits(rest)]
            self._rows[tail] = self._free_row & ~packed_row(spilling, self._vocab_size)
        return self._rows[tail]


def gap_fits(rest: bytes) -> bool:
    return len(rest) <= MAX_GAP and not rest.strip(_GAP)


@dataclass(frozen=True, slots=True)
class MarkedCompiled:
    """A compiled grammar that starts after a marker."""

    inner: Callable[[], Cursor]
    marker: Marker
    n_bytes: int

    def cursor(self) -> Cursor:
        return MarkedCursor(self.inner(), self.marker)


@dataclass(frozen=True, slots=True)
class _Place:
    """tail: what may become the marker; gap: line breaks still allowed after it, None before it."""

    tail: bytes = b""
    gap: int | None = None


class MarkedCursor:
    """Wraps the answer's cursor. `_places` has one entry a token of the free part, so rollback is token-wise."""

    def __init__(self, answer: Cursor, marker: Marker, places: tuple[_Place, ...] = (), answered: int = 0) -> None:
        self._answer = answer
        self._marker = marker
        self._places = [*places] or [_Place()]
        self._answered = answered  # tokens the answer's grammar has accepted

    @property
    def _free(self) -> bool:
        return self._places[-1].gap is None

    @property
    def _in_gap(self) -> bool:
        return bool(self._places[-1].gap) and not self._answered

    @property
    def can_stop(self) -> bool:
        return not self._free and self._answer.can_stop

    @property
    def done(self) -> bool:
        return not self._free and not self._in_gap and self._answer.done

    @property
    def near_end(self) -> bool:
        return not self._free and self._answer.near_end

    def goes_on(self, *, unforced: bool) -> bool:
        return self._free or (not self._in_gap and self._answer.goes_on(unforced=unforced))

    def fill(self, row: MaskRow) -> bool:
        here = self.allowed()
        if here is None:
            return False
        row[:] = here
        return True

    def allowed(self) -> MaskRow | None:
        if self._free:
            return self._marker.row(self._places[-1].tail)
        here = self._answer.allowed()
        return self._with_gap(here, self._places[-1].gap or 0) if here is not None and self._in_gap else here

    def _with_gap(self, row: MaskRow, room: int) -> MaskRow:
        """The answer may begin, or more line breaks may come."""
        row = row.copy()
        for token in self._marker.gap_ids:
            if len(self._marker.piece(token)) <= room:
                row[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return row

    def accept(self, token: int) -> bool:
        if self._free:
            return self._accept_free(token)
        piece, room = self._marker.piece(token), self._places[-1].gap or 0
        if self._in_gap and piece and not piece.strip(_GAP) and len(piece) <= room:
            self._places.append(_Place(gap=room - len(piece)))
            return True
        if not self._answer.accept(token):
            return False
        self._answered += 1
        return True

    def _accept_free(self, token: int) -> bool:
        piece = self._marker.piece(token)
        if self._marker.is_stop(token) or not piece:
            return False
        tail = self._places[-1].tail
        rest = self._marker.rest(tail, piece)
        if rest is None:
            self._places.append(_Place(self._marker.tail(tail + piece)))
        elif gap_fits(rest):
            self._places.append(_Place(gap=MAX_GAP - len(rest)))
        else:
            return False
        return True

    def rollback(self, n: int) -> None:
        back = min(n, self._answered)
        if back:
            self._answer.rollback(back)
            self._answered -= back
        if n - back >= len(self._places):
            raise ValueError(f"cannot take back {n} tokens")
        if n > back:
            del self._places[back - n :]

    def fork(self) -> MarkedCursor:
        return MarkedCursor(self._answer.fork(), self._marker, tuple(self._places), self._answered)

    def last_token(self) -> int | None:
        return None if self._free or self._in_gap else self._answer.last_token()

    def forced_tokens(self, limit: int) -> list[int]:
        return [] if self._free or self._in_gap else self._answer.forced_tokens(limit)
