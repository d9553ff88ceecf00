"""A grammar over token ids: at each place a set of allowed tokens. Implements the protocol, with an honest rollback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from runtime.errors import InvalidRequest, RequestFailed
from runtime.messages import GrammarSpec

END = 1
N_WORDS = 2  # of the fake model's 64 tokens


def spec_of(places: Sequence[Sequence[int]], *, open_end: bool = False) -> GrammarSpec:
    """The language of one allowed set after another; `open_end`: may stop at any later place, END allowed there."""
    return GrammarSpec(kind="regex", spec=msgspec.json.encode({"places": places, "open": open_end}).decode())


class FakeCursor:
    """Place in a FakeGrammar."""

    def __init__(self, places: Sequence[Sequence[int]], open_end: bool, at: int = 0) -> None:
        self._places, self._open, self._at = places, open_end, at
        self._ended = False

    @property
    def can_stop(self) -> bool:
        return self._at >= len(self._places) or self._ended

    @property
    def done(self) -> bool:
        return self._ended or (self._at >= len(self._places) and not self._open)

    @property
    def near_end(self) -> bool:
        return self._at >= len(self._places) - 1

    def goes_on(self, *, unforced: bool) -> bool:
        if self._ended or self.near_end:
            return False
        return not unforced or not self.forced_tokens(1)

    def ids(self) -> list[int]:
        if self._ended:
            return []
        return list(self._places[self._at]) if self._at < len(self._places) else [END]

    def fill(self, row: Any) -> bool:
        row[:] = -1
        here = self.allowed()
        if here is not None:
            row[:] = here
        return here is not None

    def allowed(self) -> Any:
        allowed = self.ids()
        if not allowed:
            raise RequestFailed("no token is allowed here")
        if allowed == [-1]:
            return None
        row = np.zeros(N_WORDS, np.int32)
        for token in allowed:
            row[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).view(np.int32))
        return row

    def accept(self, token: int) -> bool:
        if token not in self.ids() and self.ids() != [-1]:
            return False
        if token == END and self._at >= len(self._places):
            self._ended = True
        else:
            self._at += 1
        return True

    def rollback(self, n: int) -> None:
        self._at -= n

    def fork(self) -> FakeCursor:
        return FakeCursor(self._places, self._open, self._at)

    def last_token(self) -> int | None:
        place = self.ids()
        last = self._at == len(self._places) - 1 and not self._open and not self._ended
        return place[0] if last and len(place) == 1 and place[0] >= 0 else None

    def forced_tokens(self, limit: int) -> list[int]:
        out = []
        for place in self._places[self._at : self._at + limit]:
            if len(place) != 1 or place[0] == -1:
                break
            out.append(place[0])
        return out


class FakeCompiled:
    n_bytes = 100

    def __init__(self, spec: GrammarSpec) -> None:
        decoded: Mapping[str, Any] = msgspec.json.decode(spec.spec)
        self._places, self._open = decoded["places"], decoded["open"]

    def cursor(self) -> FakeCursor:
        return FakeCursor(self._places, self._open)


class FakeGrammars:
    """Compiles at once, or only when told (`slow`); a spec of "bad" cannot be compiled."""

    def __init__(self, *, slow: bool = False) -> None:
        self.slow = slow
        self.waiting: list[tuple[GrammarSpec, Future[Any]]] = []

    def compile_async(self, spec: GrammarSpec) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((spec, future))
        if not self.slow:
            self.finish()
        return future

    def finish(self) -> None:
        for spec, future in self.waiting:
            if spec.spec == "bad":
                future.set_exception(InvalidRequest("The grammar is wrong.", param=spec.param))
            else:
                future.set_result(FakeCompiled(spec))
        self.waiting.clear()

    def validate(self, spec: GrammarSpec) -> None:
        return None

    def stats(self) -> dict[str, Any]:
        return {"compiled": 0}

    def close(self) -> None:
        return None
