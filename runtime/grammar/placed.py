"""A matcher that asks its engine only where nobody has been before."""

from __future__ import annotations

from collections.abc import Callable

from runtime.grammar.beginnings import Beginnings
from runtime.grammar.cursor import Matcher
from runtime.grammar.places import Atlas, Place
from runtime.grammar.protocol import MaskRow


class PlacedMatcher:
    """Follows the text through the atlas. The engine's matcher is made, and caught up, when a place is new.

    Only tokens that a mask allowed are taken without asking: about others the engine has the last word.
    """

    __slots__ = ("_atlas", "_fed", "_inner", "_make", "_places", "_tokens")

    def __init__(self, atlas: Atlas | Beginnings, make: Callable[[], Matcher]) -> None:
        self._atlas = atlas
        self._make = make
        self._inner: Matcher | None = None
        self._fed = 0  # tokens that the engine's matcher has taken
        self._tokens: list[int] = []
        self._places: list[Place] = [atlas.start()]

    @property
    def complete(self) -> bool:
        place = self._places[-1]
        if place.complete is None:
            place.complete = self._engine().complete
        return place.complete

    @property
    def remembered(self) -> MaskRow | None:
        return self._places[-1].row

    @property
    def near_end(self) -> bool:
        place = self._places[-1]
        return self._atlas.near_end(place) if place.near_end is None else place.near_end

    @property
    def place(self) -> Place | None:
        place = self._places[-1]
        return place if place.ways is not None else None

    def mask(self, row: MaskRow) -> bool:
        place = self._places[-1]
        if place.limited is None:
            engine = self._engine()
            limited = engine.mask(row)
            if place.ways is not None and engine.failure() is None and (row.any() or not limited):
                place.row, place.limited = self._atlas.keep(row) if limited else None, limited
            return limited
        if place.row is not None:
            row[:] = place.row
        return place.limited

    def advance(self, token: int) -> bool:
        place = self._places[-1]
        known = place.by_token.get(token)
        if known is None:
            if not 0 <= token < self._atlas.n_tokens:
                return False
            if not _allows(place.row, token):
                if not self._engine().advance(token):
                    return False
                self._fed += 1
            known = self._atlas.after(place, token)
        self._tokens.append(token)
        self._places.append(known)
        return True

    def rollback(self, n: int) -> None:
        if not 0 < n <= len(self._tokens):
            raise ValueError(f"cannot take back {n} tokens")
        del self._tokens[-n:], self._places[-n:]
        if self._inner is not None and self._fed > len(self._tokens):
            self._inner.rollback(self._fed - len(self._tokens))
            self._fed = len(self._tokens)

    def fork(self) -> PlacedMatcher:
        twin = PlacedMatcher(self._atlas, self._make)
        twin._inner = self._inner.fork() if self._inner is not None else None
        twin._fed, twin._tokens, twin._places = self._fed, [*self._tokens], [*self._places]
        return twin

    def forced(self, limit: int) -> list[int]:
        place = self._places[-1]
        if place.forced is None or (len(place.forced[1]) == place.forced[0] < limit):
            place.forced = limit, tuple(self._engine().forced(limit))
        return list(place.forced[1][:limit])

    def failure(self) -> str | None:
        return self._inner.failure() if self._inner is not None else None

    def _engine(self) -> Matcher:
        """The engine's matcher, brought to this place."""
        if self._inner is None:
            self._inner = self._make()
        for token in self._tokens[self._fed :]:
            if not self._inner.advance(token):
                raise ValueError(f"the grammar's engine does not take token {token}, which it allowed")
            self._fed += 1
        return self._inner


def _allows(row: MaskRow | None, token: int) -> bool:
    return row is not None and bool(int(row[token >> 5]) >> (token & 31) & 1)
