"""The exact bytes of every token id, for byte-level BPE and SentencePiece vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer as Backend

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "▁"


@cache
def byte_alphabet() -> dict[str, int]:
    """The printable stand-in character of each byte in GPT-2 style vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def byte_level_piece(piece: str) -> bytes:
    """Bytes of one byte-level piece; a piece outside the alphabet stands for its own text."""
    table = byte_alphabet()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_piece(piece: str) -> bytes:
    """Bytes of one SentencePiece piece: `<0x0A>` is a byte, `▁` is a space."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()


def token_bytes_of(backend: Backend) -> list[bytes]:
    """Bytes of ids 0..max; an id nobody uses has none. Added tokens stand for their own text."""
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    convert = _piece_converter(vocab)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for piece, token in vocab.items():
        table[token] = convert(piece)
    for token, added in backend.get_added_tokens_decoder().items():
        table[token] = added.content.encode()
    return table


def _piece_converter(vocab: dict[str, int]) -> Callable[[str], bytes]:
    """Byte-level vocabularies write a space as `Ġ`, SentencePiece ones as `▁`; only one knows `<0x0A>`."""
    return sentencepiece_piece if "<0x0A>" in vocab or SPACE_MARK in vocab else byte_level_piece
