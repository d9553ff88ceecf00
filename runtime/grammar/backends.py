"""The two engines that match grammars. Each is imported when it is first needed and knows nothing of requests."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Protocol

from runtime.grammar.cursor import Matcher
from runtime.grammar.marks import NO_TEXT, resolve
from runtime.grammar.pieces import Pieces, packed_row
from runtime.grammar.protocol import MaskRow, Vocabulary

BackendName = Literal["xgrammar", "llguidance"]
TextKind = Literal["ebnf", "lark", "structural_tag"]
_MAX_MARKED = 8
_EXCERPT = re.compile(r"\s*(\d+ \||\^+\s*$)")  # a numbered line of a grammar, or the mark below it
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class BackendError(ValueError):
    """The engine refuses the grammar; the message is its reason."""


class Template(Protocol):
    """A compiled grammar of one engine."""

    n_bytes: int

    def matcher(self) -> Matcher: ...


class Backend(Protocol):
    def compile(self, kind: TextKind, text: str) -> Template:
        """Releases the GIL while it works. Raises BackendError."""
        ...


def make_backend(name: BackendName, vocab: Vocabulary, pieces: Pieces) -> Backend:
    return Xgrammar(vocab) if name == "xgrammar" else Llguidance(vocab, pieces)


def _last_line(error: object) -> str:
    """The engine's own words without the place in its sources."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["unknown error"]
    line = lines[-1]
    for marker in (".cc:", ".h:"):
        if marker in line:
            line = line.split(marker, 1)[1].partition(" ")[2]
    return line[:300]


def _reason(error: object) -> str:
    """Why llguidance gave up, without its state, which it tells after that, and the places in our text for it."""
    lines = str(error).partition("\n<")[0].splitlines()
    said = [line for line in lines if line.strip() and not _EXCERPT.match(line)] or ["unknown error"]
    last = said[-1].removeprefix("error: ") if said[-1].startswith("error: ") else said[0]
    return _PLACE.sub("", last)[:300]


class Xgrammar:
    """One compiler for the vocabulary. Control tokens have no bytes, so no text matches them."""

    def __init__(self, vocab: Vocabulary) -> None:
        import xgrammar

        self._lib = xgrammar
        self._vocab = vocab
        pieces = [b"" if i in vocab.control_ids else piece for i, piece in enumerate(vocab.token_bytes)]
        self._pieces = pieces
        real = packed_row((i for i, piece in enumerate(pieces) if piece or i in vocab.stop_ids), vocab.vocab_size)
        self._real = None if vocab.vocab_size % 32 == 0 == vocab.vocab_size - len(pieces) else real
        self._compiler = self._new_compiler(pieces)
        self._marked: dict[frozenset[int], Any] = {}  # compilers for tags in which control tokens stand

    def _new_compiler(self, pieces: list[bytes]) -> Any:
        info = self._lib.TokenizerInfo(
            pieces,
            self._lib.VocabType.RAW,
            vocab_size=self._vocab.vocab_size,
            stop_token_ids=sorted(self._vocab.stop_ids),
            add_prefix_space=False,
        )
        # The cache is ours: bounded by bytes, counted, and shared with the other engine.
        return self._lib.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _compile_tags(self, document: Any) -> tuple[Any, MaskRow | None]:
        """The grammar, and the bits that are tokens in it."""
        document, marks = resolve(document, self._vocab)
        if not marks:
            return self._compiler.compile_structural_tag(document), self._real
        key = frozenset(marks)
        if key not in self._marked:
            if len(self._marked) >= _MAX_MARKED:
                self._marked.clear()
            pieces = list(self._pieces)
            for i, piece in marks.items():
                pieces[i] = NO_TEXT + piece
            self._marked[key] = self._new_compiler(pieces)
        real = None if self._real is None else self._real | packed_row(marks, self._vocab.vocab_size)
        return self._marked[key].compile_structural_tag(document), real

    def compile(self, kind: TextKind, text: str) -> Template:
        try:
            if kind == "structural_tag":
                compiled, real = self._compile_tags(json.loads(text))
            else:
                compiled, real = self._compiler.compile_grammar(text), self._real
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise BackendError(_last_line(error)) from None
        return _XgrammarTemplate(self._lib, compiled, real, len(text))


class _XgrammarTemplate:
    def __init__(self, lib: Any, compiled: Any, real: MaskRow | None, n_text: int) -> None:
        self._lib = lib
        self._compiled = compiled
        self._real = real
        self.n_bytes = int(compiled.memory_size_bytes) + n_text

    def matcher(self) -> Matcher:
        return _XgrammarMatcher(self._lib.GrammarMatcher(self._compiled), self._real)


class _XgrammarMatcher:
    __slots__ = ("_inner", "_real")
    remembered = None
    near_end = False
    place = None

    def __init__(self, inner: Any, real: MaskRow | None) -> None:
        self._inner = inner
        self._real = real  # the bits that are tokens: xgrammar leaves those past the vocabulary set

    @property
    def complete(self) -> bool:
        return bool(self._inner.is_completed())

    def mask(self, row: MaskRow) -> bool:
        limited = bool(self._inner.fill_next_token_bitmask(row[None], 0))
        if limited and self._real is not None:
            row &= self._real
        return limited

    def advance(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))

    def rollback(self, n: int) -> None:
        self._inner.rollback(n)

    def fork(self) -> Matcher:
        return _XgrammarMatcher(self._inner.fork(), self._real)

    def forced(self, limit: int) -> list[int]:
        return list(self._inner.find_jump_forward_tokens()[:limit])

    def failure(self) -> str | None:
        return None


class Llguidance:
    """A matcher is compiled once and copied for every request; copies share what their lexer learns."""

    def __init__(self, vocab: Vocabulary, pieces: Pieces) -> None:
        import llguidance
        from llguidance._tokenizer import TokenizerWrapper

        self._lib = llguidance
        self._pieces = pieces
        self._mask_bytes = (vocab.vocab_size + 31) // 32 * 4
        wrapper = TokenizerWrapper(_LlguidanceVocabulary(vocab, pieces))
        self._tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=vocab.vocab_size, eos_token=sorted(vocab.stop_ids) or None
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, kind: TextKind, text: str) -> Template:
        if kind != "lark":
            raise BackendError(f"llguidance does not read {kind}")
        grammar = self._lib.LLMatcher.grammar_from_lark(text)
        inner = self._lib.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if inner.is_error():
            raise BackendError(_reason(inner.get_error()))
        return _LlguidanceTemplate(inner, self._pieces, self._mask_bytes, len(text))


class _LlguidanceVocabulary:
    """What LLTokenizer asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocab: Vocabulary, pieces: Pieces) -> None:
        self.eos_token_id = min(vocab.stop_ids)
        padding = range(len(vocab.token_bytes), vocab.vocab_size)
        self.tokens = [*vocab.token_bytes, *(b"<pad %d>" % i for i in padding)]
        self.special_token_ids = sorted(vocab.control_ids | set(vocab.stop_ids) | set(padding))
        self._pieces = pieces

    def __call__(self, text: bytes | str) -> list[int]:
        return self._pieces.split(text if isinstance(text, bytes) else text.encode())


class _LlguidanceTemplate:
    _LEXER_BYTES = 192 * 1024  # measured: what a grammar keeps once its lexer has seen typical text

    def __init__(self, inner: Any, pieces: Pieces, mask_bytes: int, n_text: int) -> None:
        self._inner = inner
        self._pieces = pieces
        self._mask_bytes = mask_bytes
        self.n_bytes = self._LEXER_BYTES + 16 * n_text

    def matcher(self) -> Matcher:
        return _LlguidanceMatcher(self._inner.deep_copy(), self._pieces, self._mask_bytes)


class _LlguidanceMatcher:
    __slots__ = ("_inner", "_mask_bytes", "_pieces")
    remembered = None
    near_end = False
    place = None

    def __init__(self, inner: Any, pieces: Pieces, mask_bytes: int) -> None:
        self._inner = inner
        self._pieces = pieces
        self._mask_bytes = mask_bytes

    @property
    def complete(self) -> bool:
        return bool(self._inner.is_accepting())

    def mask(self, row: MaskRow) -> bool:
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, self._mask_bytes)
        if self._inner.is_error():
            row[:] = 0
        return True

    def advance(self, token: int) -> bool:
        return int(self._inner.try_consume_tokens([token])) == 1

    def rollback(self, n: int) -> None:
        self._inner.rollback(n)

    def fork(self) -> Matcher:
        return _LlguidanceMatcher(self._inner.deep_copy(), self._pieces, self._mask_bytes)

    def forced(self, limit: int) -> list[int]:
        return self._pieces.stable(bytes(self._inner.compute_ff_bytes()), limit)

    def failure(self) -> str | None:
        return _reason(self._inner.get_error()) if self._inner.is_error() else None
