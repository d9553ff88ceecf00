"""The face of structured output: what the scheduler may ask of a grammar.

A `Compiled` grammar is immutable and shared between requests and threads. A `Cursor` is one request's place
in it: made once, kept through retraction, used by one thread at a time.

    future = service.compile_async(spec)          # never blocks; single-flight per spec
    cursor = future.result().cursor()
    if cursor.fill(row):                          # False: every token is allowed, no mask needed
        ...apply `row` to the logits, sample t...
    cursor.accept(t)
    for f in cursor.forced_tokens(64):            # tokens nobody has to sample
        cursor.accept(f)
    if cursor.done: ...                           # finish with reason "stop"; no stop id is needed

Errors: the future raises InvalidRequest (400) for a grammar that cannot be enforced, is too large or takes too
long. `fill` raises RequestFailed for this one request: no token is allowed, the backend gave up, or the
request has used up its mask time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.messages import GrammarSpec

MaskRow = npt.NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """int32 words of one packed mask row."""
    return (vocab_size + 31) // 32


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as grammars see them.

    `token_bytes[i]`: exact bytes of id i. `vocab_size`: width of the logits; ids past `token_bytes` are padding
    and never allowed. `control_ids`: ids that stand for no text (chat markers); never allowed inside a grammar.
    `stop_ids`: every id that ends a turn (model config, generation config, tokenizer, chat end).
    """

    token_bytes: tuple[bytes, ...]
    vocab_size: int
    stop_ids: tuple[int, ...]
    control_ids: frozenset[int]


class Cursor(Protocol):
    """One request's place in a grammar. Rollback is token-wise: one accept, one step."""

    @property
    def can_stop(self) -> bool:
        """The text so far is complete: stop ids are allowed here, and only here."""
        ...

    @property
    def done(self) -> bool:
        """Complete, and nothing but a stop id may follow (also after a stop id was accepted)."""
        ...

    @property
    def near_end(self) -> bool:
        """One more token may complete the text, as far as can be told cheaply: a hint, False where it is not known."""
        ...

    def goes_on(self, *, unforced: bool) -> bool:
        """Whether it is known already that the text is neither complete nor near its end, that no token must be its
        last, and with `unforced` that none is forced. False where somebody has to look."""
        ...

    def fill(self, row: MaskRow) -> bool:
        """Write the allowed tokens into `row` (bit set = allowed, little bit order, mask_words(vocab) words).

        Returns False, leaving `row` untouched, where every token is allowed. Raises RequestFailed.
        """
        ...

    def allowed(self) -> MaskRow | None:
        """The same row without a copy: shared, so not to be written. None where every token is allowed."""
        ...

    def accept(self, token: int) -> bool:
        """Move on by one token. False, and no move, if the grammar does not allow it here.

        After a stop id nothing more is accepted.
        """
        ...

    def rollback(self, n: int) -> None:
        """Take back the last n accepted tokens (stop id included)."""
        ...

    def fork(self) -> Cursor:
        """An independent cursor at the same place."""
        ...

    def last_token(self) -> int | None:
        """The token that completes the text, where nothing else may come. Raises RequestFailed."""
        ...

    def forced_tokens(self, limit: int) -> list[int]:
        """The next tokens that the grammar leaves no choice about, at most `limit`; the cursor does not move.

        The last token of a forced text is held back where what follows could merge into it, so appending the
        result keeps the tokenisation the model is used to. Stop ids are never among them.
        """
        ...


class Compiled(Protocol):
    """An immutable grammar, shared between requests."""

    def cursor(self) -> Cursor: ...

    @property
    def n_bytes(self) -> int:
        """Memory it holds, as counted by the cache."""
        ...


class GrammarService(Protocol):
    """Compiles grammars off the scheduler's thread."""

    def compile_async(self, spec: GrammarSpec) -> Future[Compiled]:
        """A future of the compiled grammar. Never blocks; the same spec is compiled once."""
        ...

    def validate(self, spec: GrammarSpec) -> None:
        """Static check for the frontends' door: raises InvalidRequest naming the offending place."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters and gauges for the metrics page."""
        ...

    def close(self) -> None: ...


def forced_run(cursor: Cursor, limit: int) -> Sequence[int]:
    """Accept the forced tokens at the cursor's place and return those that were accepted."""
    taken: list[int] = []
    for token in cursor.forced_tokens(limit):
        if not cursor.accept(token):
            break
        taken.append(token)
    return taken
