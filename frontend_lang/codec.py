"""Text to token ids, as the model's tokenizer would have it for the whole text, piece by piece.

Byte-pair tokenizers first split text into words. No token crosses such a border, so ids before a border cannot be
changed by what is appended later: they may be committed. The text after the last border stays *open*
and is tokenised together with what follows. That is how `"The cat" + " sat"`, however it is cut, gives the ids of
`"The cat sat"` without ever encoding the whole again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence

from frontend_lang.backend import Backend
from frontend_lang.ir import Text

CACHED_TEXTS = 4096
_BORDER = re.compile(r"[a-z](?= [a-z])")  # "word word": every word-splitting tokenizer cuts before the space
_PROBES = ("The cat sat on the mat", "a  b the old\n\nhouse of cards 42 and more", "It's what they'd say to me")


class Codec:
    """Encodes runs of text for one backend, remembering recent ones."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._specials = dict(backend.specials)
        names = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._memory: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._splits_words: bool | None = None
        self.n_encoded = 0  # characters given to the tokenizer
        self.texts: list[str] | None = None  # set to [] to record what is tokenised

    async def encode(self, pieces: Sequence[Text]) -> list[int]:
        """Ids of the pieces read as one text. Special tokens count only inside pieces marked special."""
        ids: list[int] = []
        for unit in self.units(pieces):
            if isinstance(unit, int):
                ids.append(unit)
            else:
                ids.extend(await self._plain(unit))
        return ids

    def units(self, pieces: Sequence[Text]) -> list[int | str]:
        """Special ids and the runs of plain text between them; neighbouring runs are one run."""
        out: list[int | str] = []
        for piece in pieces:
            start = 0
            if piece.special and self._special is not None:
                for match in self._special.finditer(piece.text):
                    _append_run(out, piece.text[start : match.start()])
                    out.append(self._specials[match.group()])
                    start = match.end()
            _append_run(out, piece.text[start:])
        return out

    async def settled(self, pieces: Sequence[Text]) -> tuple[list[int | str], str]:
        """(units that later text cannot change, the open rest of the last run)."""
        units = self.units(pieces)
        if not units or isinstance(units[-1], int):
            return units, ""
        run = units.pop()
        assert isinstance(run, str)
        cut = await self._border(run)
        if cut:
            units.append(run[:cut])
        return units, run[cut:]

    async def encode_units(self, units: Sequence[int | str]) -> list[int]:
        ids: list[int] = []
        for unit in units:
            if isinstance(unit, int):
                ids.append(unit)
            else:
                ids.extend(await self._plain(unit))
        return ids

    async def _border(self, run: str) -> int:
        """Position of the last word border of the run, 0 if there is none."""
        if self._splits_words is None:
            self._splits_words = await self._probe()
        if not self._splits_words:
            return 0
        cut = 0
        for match in _BORDER.finditer(run, max(0, len(run) - 512)):
            cut = match.end()
        return cut

    async def _probe(self) -> bool:
        """Whether this tokenizer really never joins words (some do); then nothing is settled early."""
        for text in _PROBES:
            whole = list(await self._backend.encode(text))
            for match in _BORDER.finditer(text):
                left, right = text[: match.end()], text[match.end() :]
                if [*await self._backend.encode(left), *await self._backend.encode(right)] != whole:
                    return False
        return True

    async def _plain(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        known = self._memory.get(text)
        if known is not None:
            self._memory.move_to_end(text)
            return known
        ids: list[int] = []
        for part in self._defused(text):
            self.n_encoded += len(part)
            if self.texts is not None:
                self.texts.append(part)
            ids.extend(await self._backend.encode(part))
        self._memory[text] = tuple(ids)
        if len(self._memory) > CACHED_TEXTS:
            self._memory.popitem(last=False)
        return ids

    def _defused(self, text: str) -> list[str]:
        """The text cut inside every special token's name, so that none is read as one."""
        if self._special is None or self._special.search(text) is None:
            return [text]
        parts, start = [], 0
        for match in self._special.finditer(text):
            cut = match.start() + max(1, len(match.group()) // 2)
            parts.append(text[start:cut])
            start = cut
        parts.append(text[start:])
        return [part for part in parts if part]


def _append_run(units: list[int | str], text: str) -> None:
    if not text:
        return
    if units and isinstance(units[-1], str):
        units[-1] += text
    else:
        units.append(text)
