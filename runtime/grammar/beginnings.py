"""The first places of a grammar that nobody follows: where every request under it comes by."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.grammar.places import Atlas, KeptRows, Place, atlas_of
from runtime.grammar.protocol import MaskRow
from runtime.grammar.rules import Grammar

MAX_DEPTH = 16  # tokens from the beginning; behind that texts hardly ever meet again
MAX_PLACES = 512
MAX_ROW_BYTES = 1 << 20


class _Beginning(Place):
    """Told apart by the tokens that lead there, which its parents know."""

    __slots__ = ("depth",)

    def __init__(self, depth: int) -> None:
        super().__init__(frozenset())
        self.depth = depth


class Beginnings:
    """As an `Atlas`, where two texts are at the same place only if they are the same tokens."""

    n_bytes = 64 << 10  # typically

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.n_tokens = len(token_bytes)
        self._clear()

    def _clear(self) -> None:
        self._start = _Beginning(0)
        self._rows = KeptRows()
        self._n_places = 1

    def start(self) -> Place:
        if self._n_places > MAX_PLACES or self._rows.n_bytes > MAX_ROW_BYTES:
            self._clear()
        return self._start

    def keep(self, row: MaskRow) -> MaskRow:
        return self._rows.keep(row)

    def after(self, place: Place, token: int) -> Place:
        """Where the token leads, where nobody took it before."""
        if not isinstance(place, _Beginning) or place.depth == MAX_DEPTH:
            return Place(None)
        known = place.by_token[token] = _Beginning(place.depth + 1)
        self._n_places += 1
        return known

    def near_end(self, place: Place) -> bool:
        place.near_end = False
        return False


def places_of(grammar: Grammar | None, token_bytes: Sequence[bytes]) -> Atlas | Beginnings:
    """What is remembered of a grammar: all its places where it can be followed, else the first ones."""
    return atlas_of(grammar, token_bytes) or Beginnings(token_bytes)
