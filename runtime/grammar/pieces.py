"""The vocabulary as byte pieces: forced text to tokens, and packed rows of single ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.grammar.protocol import MaskRow, Vocabulary, mask_words


def packed_row(ids: Iterable[int], vocab_size: int) -> MaskRow:
    """A mask row in which exactly these ids are allowed."""
    bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Pieces:
    """Longest-match tokenisation of forced bytes.

    Measured on byte-level BPE it gives what the model's own tokenizer gives, provided the last piece is held back
    whenever a longer token starts with it: what follows could still merge into it.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        banned = vocab.control_ids | set(vocab.stop_ids)
        self._ids: dict[bytes, int] = {}
        self.n_words = mask_words(vocab.vocab_size)
        self._first = np.full(self.n_words * 32, -1, np.int16)  # each token's first byte; -1: it is no text
        for token, piece in enumerate(vocab.token_bytes):
            if piece and token not in banned:
                self._ids.setdefault(piece, token)
                self._first[token] = piece[0]
        self._longest = max(map(len, self._ids), default=0)
        self._extends = {piece[:n] for piece in self._ids for n in range(1, len(piece))}

    def only_byte(self, row: MaskRow) -> bytes | None:
        """The byte with which everything that the row allows begins; None where bytes differ, or a text may end."""
        first = self._first[np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]
        if not len(first) or first[0] < 0 or (first != first[0]).any():
            return None
        return bytes([first[0]])

    def split(self, data: bytes) -> list[int]:
        """Ids of the bytes, longest piece first, as far as the vocabulary goes."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            end = min(len(data), start + self._longest)
            while end > start and data[start:end] not in self._ids:
                end -= 1
            if end == start:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids

    def stable(self, data: bytes, limit: int) -> list[int]:
        """Ids of forced bytes without the last one where it could still change."""
        ids: list[int] = []
        start = 0
        while start < len(data) and len(ids) < limit:
            rest = data[start : start + self._longest]
            if len(data) - start < self._longest and rest in self._extends:
                break  # a longer token may start here
            end = len(rest)
            while end and rest[:end] not in self._ids:
                end -= 1
            if end == 0:
                break
            ids.append(self._ids[rest[:end]])
            start += end
        return ids
