"""What the grammar tests share: compile with one backend, try a text, walk at random through the masks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from email.headerregistry import Address
from functools import cached_property
from typing import Any

import jsonschema
import numpy as np

from runtime.errors import InvalidRequest
from runtime.grammar.backends import Backend, BackendError, BackendName
from runtime.grammar.beginnings import places_of
from runtime.grammar.cursor import Counters, MaskBudget
from runtime.grammar.limits import Limits
from runtime.grammar.pieces import Pieces, packed_row
from runtime.grammar.prepare import Choice, prepare
from runtime.grammar.protocol import Compiled, Cursor, Vocabulary, mask_words
from runtime.grammar.service import CompiledGrammar
from runtime.messages import GrammarSpec


def schema_spec(schema: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", spec=json.dumps(schema), **options)


def allowed(cursor: Cursor, n_words: int) -> np.ndarray:
    """Ids of the tokens allowed here."""
    row = np.full(n_words, -1, np.int32)
    cursor.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


@dataclass(repr=False)
class Toolkit:
    vocab: Vocabulary
    pieces: Pieces
    backends: dict[BackendName, Backend]

    @property
    def n_words(self) -> int:
        return mask_words(self.vocab.vocab_size)

    def compile(self, spec: GrammarSpec, backend: Choice = "auto") -> Compiled:
        """Raises InvalidRequest exactly where a service with that backend would."""
        prepared = prepare(spec, backend, Limits())
        try:
            template = self.backends[prepared.backend].compile(prepared.kind, prepared.text)
        except BackendError as error:
            raise InvalidRequest(f"JSON schema at '?': {error}") from None
        stops = self.vocab.stop_ids
        return CompiledGrammar(
            template,
            frozenset(stops),
            packed_row(stops, self.vocab.vocab_size),
            Counters(),
            MaskBudget(slow_s=10.0, once_s=60.0),  # the machine may be busy
            places_of(prepared.grammar, self.vocab.token_bytes),
        )

    def takes(self, compiled: Compiled, text: str) -> bool:
        """Whether the grammar takes the whole text. What a mask allows on the way is always accepted.

        (The reverse need not hold: where bytes are forced, llguidance allows only the canonical token.)
        """
        cursor = compiled.cursor()
        for token in self.pieces.split(text.encode()):
            permitted = token in allowed(cursor, self.n_words)
            accepted = cursor.accept(token)
            assert accepted or not permitted, (text, token)
            if not accepted:
                return False
        return cursor.can_stop

    def random_text(self, compiled: Compiled, seed: int, max_tokens: int = 60) -> str | None:
        """A text found by following random allowed tokens; None if it did not come to an end in time."""
        chooser = np.random.default_rng(seed)
        cursor, data = compiled.cursor(), b""
        for step in range(max_tokens):
            if cursor.done or (cursor.can_stop and chooser.random() < 0.4):
                return data.decode()
            ids = np.setdiff1d(allowed(cursor, self.n_words), self.vocab.stop_ids, assume_unique=True)
            ends = ids[np.isin(ids, self._ends)] if step > max_tokens // 4 else ids[:0]
            plain = ids[np.isin(ids, self._plain)] if chooser.random() < 0.7 else ids[:0]
            token = int(chooser.choice(ends if len(ends) else plain if len(plain) else ids))
            assert cursor.accept(token)
            data += self.vocab.token_bytes[token]
        return data.decode() if cursor.can_stop else None

    @cached_property
    def _ends(self) -> np.ndarray:
        wanted = {b'"', b"}", b"]", b'"}', b'"]', b'",', b'":'}
        return np.array([i for i, piece in enumerate(self.vocab.token_bytes) if piece in wanted])

    @cached_property
    def _plain(self) -> np.ndarray:
        """Tokens that look like JSON."""
        shape = re.compile(rb'["\]},:0-9 a-z]+')
        return np.array([i for i, piece in enumerate(self.vocab.token_bytes) if shape.fullmatch(piece)])


def is_valid(schema: Any, text: str) -> bool:
    """The verdict of the reference validator, formats included, on exact decimals."""
    value = json.loads(text, parse_float=Decimal)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    kind = jsonschema.validators.extend(kind, type_checker=_DECIMAL_TYPES)
    return bool(kind(exact, format_checker=FORMATS).is_valid(value))


def _number(_: Any, value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _integer(_: Any, value: Any) -> bool:
    return _number(_, value) and value == int(value)


def _formats() -> jsonschema.FormatChecker:
    """Judges of formats, none of them ours but the ranges: those of jsonschema, the same for every draft. Of emails it
    knows only the `@`, so the standard library reads their addresses."""
    checker = jsonschema.FormatChecker(())
    checker.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    for bits in (32, 64):
        checker.checks(f"int{bits}")(lambda v, n=bits: not _number(None, v) or _fits(v, n))
    checker.checks("email", raises=Exception)(lambda v: not isinstance(v, str) or bool(Address(addr_spec=v)))
    return checker


def _fits(value: Any, bits: int) -> bool:
    return bool(value == int(value) and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1))


FORMATS = _formats()

_DECIMAL_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _number).redefine("integer", _integer)
