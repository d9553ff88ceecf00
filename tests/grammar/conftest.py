"""The real vocabulary, and one service for all tests that do not count things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.grammar.backends import Llguidance, Xgrammar
from runtime.grammar.pieces import Pieces
from runtime.grammar.protocol import Vocabulary
from runtime.grammar.service import CompileService, vocabulary
from runtime.text.tokenizer import Tokenizer
from tests.grammar.toolkit import Toolkit

MODEL = Path.home() / ".cache/ramet/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_model(MODEL)


@pytest.fixture(scope="session")
def vocab(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary(tokenizer.token_bytes, tokenizer.vocab_size, tokenizer.special_ids, (0, 2))


@pytest.fixture(scope="session")
def kit(vocab: Vocabulary) -> Toolkit:
    pieces = Pieces(vocab)
    return Toolkit(vocab, pieces, {"xgrammar": Xgrammar(vocab), "llguidance": Llguidance(vocab, pieces)})


@pytest.fixture(scope="session")
def service(vocab: Vocabulary) -> Iterator[CompileService]:
    service = CompileService(vocab)
    service.warm().result()
    yield service
    service.close()
