"""Ids to text, piece by piece: never half a character, a prompt fragment, or part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from runtime.text.stop_regex import ScannedFilter
from runtime.text.stops import StopFilter

_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The pieces of `push` and the last one of `finish` join to the same text, however the ids are cut.

    `prompt_tail_ids` (the last few ids of the prompt) matter only when the prompt ends inside a character:
    if the answer completes it, the whole character is given once; if not, the prompt's half is dropped.
    An unfinished character at the end of the answer becomes one U+FFFD. `stop_hit` is the stop string that
    matched; text after it is never given.
    """

    __slots__ = ("_filter", "_half", "_hidden", "_plain", "_size", "_token_bytes", "_utf8")

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int] = (),
        prompt_tail_ids: Iterable[int] = (),
        stops: Iterable[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        stop_regex: Sequence[str] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._size = len(token_bytes)
        self._hidden = special_ids if skip_special else frozenset()
        self._utf8 = _decoder("replace")
        stops = tuple(stops)
        self._filter: StopFilter | ScannedFilter | None = None
        if stop_regex:
            self._filter = ScannedFilter(dict.fromkeys(stops), stop_regex, include_stop=include_stop)
        elif stops:
            self._filter = StopFilter(stops, include_stop=include_stop)
        self._half = _unfinished(b"".join(token_bytes[i] for i in prompt_tail_ids if 0 <= i < self._size))
        self._plain = self._filter is None and not self._half  # nothing is held, so ASCII is its own text

    @property
    def stop_hit(self) -> str | None:
        """The stop string that ended the text."""
        hit = self._filter.hit if self._filter else None
        return None if hit is None else hit.decode()

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids."""
        table, size, hidden = self._token_bytes, self._size, self._hidden
        data = b""
        for i in ids:  # mostly one
            if i not in hidden and 0 <= i < size:
                data += table[i]
        if self._plain and data.isascii():
            return data.decode("ascii")
        return self._push(data)

    def _push(self, data: bytes) -> str:
        if self._filter is not None:
            data = self._filter.push(data)
        if self._half and data:
            data = self._join_half(data)
        text = self._utf8.decode(data)
        self._plain = self._filter is None and not self._half and not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """What was still held; call once, after the last push."""
        data = b""
        if self._filter is not None and self._filter.hit is None:
            data = self._filter.finish()
        if self._half:
            data = self._join_half(data) if data else b""
        return self._utf8.decode(data, final=True)

    def _join_half(self, data: bytes) -> bytes:
        """Put the prompt's half character before the answer's first bytes, if they continue it."""
        half, self._half = self._half, b""
        return half + data if _unfinished(half + data[:1]) or _is_whole(half + data[:1]) else data


def _is_whole(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def _unfinished(data: bytes) -> bytes:
    """The incomplete but so far valid UTF-8 character that `data` ends with (at most three bytes)."""
    tail = data[-4:]
    for start in range(len(tail) - 1, -1, -1):
        if tail[start] >= 0xC0:
            decoder = _decoder("strict")
            try:
                decoder.decode(tail[start:])
            except UnicodeDecodeError:
                return b""
            return decoder.getstate()[0]
    return b""
