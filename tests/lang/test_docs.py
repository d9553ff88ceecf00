"""The blocks of docs/language.md, run as they stand on the model they were written with: values and costs are theirs.

A block is run as the page says: by itself, on an engine that has run the page's first program once. Another variant of
the kernels rounds otherwise, so a greedy answer may differ in a word: the page is held to the one that wrote it.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ramet as rt
from kernels.cpu import load

VARIANT = "avx2"
EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text()


def block(word: str) -> tuple[str, str]:
    """The code of the first block that holds `word`, and the text behind it up to the next block."""
    parts = re.split(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    return next((code, text) for code, text in zip(parts[1::2], parts[2::2], strict=True) if word in code)


def numbers(text: str, pattern: str) -> tuple[int, ...]:
    """The numbers that `pattern` finds in the text behind a block."""
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, f"the page does not say {pattern!r}"
    return tuple(int(number.replace(",", "")) for number in found.groups())


def program(word: str) -> rt.Program[..., Any]:
    """The block as the body of a program."""
    source = "def body(s):\n" + textwrap.indent(block(word)[0], "    ")
    names: dict[str, Any] = {"rt": rt, "dataclass": dataclass, "__name__": __name__}
    exec(compile(source, "language.md", "exec"), names)
    made: rt.Program[..., Any] = rt.function(names["body"])
    return made


@pytest.fixture(scope="module")
def model() -> Iterator[rt.Engine]:
    ops = load()
    if ops is None or ops.variant != VARIANT:
        pytest.skip(f"the page's numbers are of the {VARIANT} kernels")
    with rt.Engine() as engine:
        yield engine


@pytest.fixture
def capital() -> rt.Program[..., Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block("def capital")[0].split("with rt.Engine")[0], "language.md", "exec"), names)
    made: rt.Program[..., Any] = names["capital"]
    return made


@pytest.fixture
def engine(model: rt.Engine, capital: rt.Program[..., Any]) -> rt.Engine:
    model.flush()
    capital.run(model, "France")
    return model


def test_the_first_program(model: rt.Engine, capital: rt.Program[..., Any]) -> None:
    model.flush()
    first, second = capital.run(model, "France"), capital.run(model, "France")
    assert f"# {first.value}" in PAGE
    cold, warm = first.totals, second.totals
    told = numbers(PAGE, r"Totals\(.*?prompt=(\d+), prefilled=(\d+), reused=(\d+)")
    assert (cold.prompt, cold.prefilled, cold.reused) == told
    assert (warm.prefilled, warm.reused) == numbers(PAGE, r"the second time: prefilled=(\d+), reused=(\d+)")


@pytest.mark.parametrize(
    ("word", "names"),
    [("capital of Italy", ["city", "other"]), ("Name a colour", ["colour"]), ("big city", ["legs", "insect", "city"])],
)
def test_values(engine: rt.Engine, word: str, names: list[str]) -> None:
    result = program(word).run(engine)
    values = tuple(result[name] for name in names)
    assert repr(values if len(values) > 1 else values[0]).replace("body.<locals>.", "") in block(word)[0]


def test_a_chain_is_one_request(engine: rt.Engine) -> None:
    assert program("capital of Italy").run(engine).totals.requests == 1


@pytest.mark.parametrize(
    ("word", "pattern"),
    [
        ("Name a colour", r"prefilled once \((\d+) of (\d+) prompt tokens here\)"),
        ('s.fork(["red"', r"(\d+) of (\d+) prompt tokens prefilled"),
    ],
)
def test_what_branches_and_samples_share(engine: rt.Engine, word: str, pattern: str) -> None:
    totals = program(word).run(engine).totals
    assert (totals.messages, totals.prefilled, totals.prompt) == (1, *numbers(block(word)[1], pattern))


def test_what_a_grammar_forces(engine: rt.Engine) -> None:
    totals = program("big city").run(engine).totals
    forced = numbers(block("big city")[1], r"(\d+) tokens generated, (\d+) of them forced")
    assert (totals.requests, totals.generated, totals.forced) == (1, *forced)


def test_a_select_computes_one_token_the_second_time(engine: rt.Engine) -> None:
    select = program("Is the sky blue?")
    first, second = select.run(engine), select.run(engine)
    assert first.info("blue").scores == second.info("blue").scores
    told = numbers(block("Is the sky blue?")[1], r"(\d+) token computed of (\d+)")
    assert (second.totals.prefilled, second.totals.prompt) == told


def test_a_batch(engine: rt.Engine, capital: rt.Program[..., Any]) -> None:
    code, text = block("run_batch")
    batch = capital.run_batch(engine, ["France", "Spain", "Japan", "Peru"], progress=False)
    assert repr([result.value for result in batch]) in re.sub(r"\n#\s*", " ", code)
    told = numbers(text, r"(\d+) of (\d+) prompt tokens were computed")
    assert (batch.totals.prefilled, batch.totals.prompt) == told


@pytest.mark.parametrize("name", ["tree_of_thought", "batch_extraction", "judge"])
def test_the_examples_cost_what_the_page_says(model: rt.Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module(name)
    model.flush()
    if name == "tree_of_thought":
        totals = example.tree_of_thought.run(model, task=example.TASK).totals
    elif name == "judge":
        totals = example.judge.run(model, question=example.QUESTION, answers=example.ANSWERS).totals
    else:
        totals = example.extract.run_batch(model, example.TEXTS, on_error="return", progress=False).totals
        told = numbers(PAGE, rf"`{name}.py`:.*?(\d+) of (\d+) answer tokens appended by the grammar")
        assert (totals.forced, totals.generated) == told
    told = numbers(PAGE, rf"`{name}.py`: [^.]*?([\d,]+) tokens prefilled and ([\d,]+) reused")
    assert (totals.prefilled, totals.reused) == told
    counted = re.search(rf"`{name}.py`: [^.]*?(\d+) (?:requests|rows)", " ".join(PAGE.split()))
    assert counted is not None
    assert totals.requests == int(counted.group(1))
