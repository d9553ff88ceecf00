"""When a request stops by what it said: EOS, stop token ids, stop strings matched on bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.params import SamplingParams
from runtime.text.stop_regex import StopScanner
from runtime.text.stops import find_stop


class Stop(NamedTuple):
    """`matched`: the stop string or token id, None for EOS. `n_drop`: trailing tokens that spell the stop and
    nothing else; -1 when the match begins inside a token."""

    matched: str | int | None
    n_drop: int


@dataclass(slots=True)
class StopMatcher:
    """Looks at one token after the other. Keeps only as many bytes as a stop still to come may begin in.

    A match is the one that ends first; of those, the longest: the rule by which frontends cut the text.
    """

    stops: tuple[bytes, ...]
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    keep: int  # bytes a future match may reach back
    tail: bytes = b""
    sizes: tuple[int, ...] = ()  # bytes of each of the last tokens, together at least the tail
    scanner: StopScanner | None = None  # in place of `stops`, where expressions are among them
    only_eos: bool = False  # nothing else stops it

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: frozenset[int]) -> StopMatcher:
        stops = tuple(dict.fromkeys(stop.encode() for stop in params.stop))
        keep = max((len(s) for s in stops), default=1) - 1
        scanner = StopScanner(dict.fromkeys(params.stop), params.stop_regex) if params.stop_regex else None
        stop_ids = frozenset(params.stop_token_ids)
        only_eos = not stops and not stop_ids and scanner is None
        return cls(stops, stop_ids, eos_ids, keep, scanner=scanner, only_eos=only_eos)

    def push(self, token: int, data: bytes, *, count_strings: bool = True) -> Stop | None:
        """The stop that `token`, whose visible bytes are `data`, completes. `count_strings`: False below min_tokens."""
        if token in self.stop_ids:
            return Stop(token, 1)
        if token in self.eos_ids:
            return Stop(None, 1)
        if self.scanner is not None:
            return self._scan(self.scanner, data, count_strings)
        if not self.stops:
            return None
        text = self.tail + data
        hit = find_stop(text, self.stops) if count_strings else None
        sizes = (*self.sizes, len(data))
        if hit is not None:
            return Stop(hit.stop.decode(), _tokens_after(sizes, len(text) - hit.start))
        self.tail = text[max(0, len(text) - self.keep) :] if self.keep else b""
        self.sizes = _cover(sizes, len(self.tail))
        return None

    def _scan(self, scanner: StopScanner, data: bytes, counts: bool) -> Stop | None:
        sizes = (*self.sizes, len(data))
        hit = scanner.feed(data, count=counts)
        if hit is not None:
            return Stop(hit.stop.decode(), _tokens_after(sizes, scanner.n_bytes - hit.start))
        self.sizes = _cover(sizes, scanner.n_bytes - scanner.held_from)
        return None


def _cover(sizes: tuple[int, ...], n_bytes: int) -> tuple[int, ...]:
    """The shortest end of `sizes` that adds up to at least n_bytes."""
    total = 0
    for i in range(len(sizes) - 1, -1, -1):
        if total >= n_bytes:
            return sizes[i + 1 :]
        total += sizes[i]
    return sizes


def _tokens_after(sizes: Sequence[int], n_bytes: int) -> int:
    """How many of the last tokens make up exactly the last n_bytes; -1 if n_bytes begin inside a token."""
    total = 0
    for n, size in enumerate(reversed(sizes), 1):
        total += size
        if total == n_bytes:
            return n
        if total > n_bytes:
            return -1
    return -1
