"""Stop ids and grammars: all that config and tokenizer name end an answer, exactly where its text is complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.build import Parts, assemble
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.messages import GrammarSpec
from tests.serve.scripted import byte_tokenizer

OF_CONFIG, OF_TOKENIZER = 257, 258
ENDS = {OF_CONFIG, OF_TOKENIZER}


def parts_of(backend: str) -> Parts:
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = [OF_TOKENIZER]
    runner = FakeRunner(fake_spec(tokenizer.vocab_size, 1024, (OF_CONFIG,)), n_pages=64, page_size=16, max_running=8)
    return assemble(EngineConfig(page_size=16, grammar_backend=backend), runner, tokenizer)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def both(request: Any) -> Iterator[tuple[Parts, Engine]]:
    parts = parts_of(request.param)
    with Engine.from_parts(parts) as engine:
        yield parts, engine


def allowed(cursor: Any) -> set[int]:
    row = np.full(9, -1, np.int32)
    cursor.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_the_stop_ids_of_config_and_tokenizer_end_a_complete_text(both: tuple[Parts, Engine]) -> None:
    cursor = both[0].grammar.compile_async(GrammarSpec(kind="regex", spec="ab?")).result(60).cursor()
    assert allowed(cursor) == {ord("a")}
    assert cursor.accept(ord("a"))
    assert allowed(cursor) == {ord("b")} | ENDS
    for end in ENDS:
        ended = cursor.fork()
        assert ended.accept(end)
        assert ended.done
    assert cursor.accept(ord("b"))
    assert allowed(cursor) == ENDS


@pytest.mark.parametrize("end", sorted(ENDS))
def test_either_stop_id_ends_an_answer_where_it_may(both: tuple[Parts, Engine], end: int) -> None:
    """Wanted everywhere, said only behind a complete text: at once behind the two digits, never in between."""
    for prompt in ("x", "y"):
        answer = both[1].generate(prompt, regex="[0-9]{2}([a-z]{2})*", max_tokens=40, logit_bias={end: 100.0})
        assert answer.finish_reason == "stop"
        assert answer.text.isdecimal()
        assert len(answer.text) == 2


@pytest.mark.parametrize("options", [{}, {"min_tokens": 9}, {"ignore_eos": True}], ids=str)
def test_no_bias_on_stop_ids_outlives_a_finished_grammar(both: tuple[Parts, Engine], options: dict[str, Any]) -> None:
    never = dict.fromkeys(ENDS, -100.0)
    for regex, texts in (("[0-9]{3}", None), ("abc?d?", {"ab", "abc", "abd", "abcd"}), ("yes|no", {"yes", "no"})):
        answer = both[1].generate("x", regex=regex, max_tokens=40, temperature=0, logit_bias=never, **options)
        assert answer.finish_reason == "stop"
        assert answer.text in texts if texts else len(answer.text) == 3
    answer = both[1].generate("x", regex="a+", max_tokens=12, temperature=0, logit_bias=never)
    assert (answer.finish_reason, answer.text) == ("length", "a" * 12)  # not finished: a bias is a bias
