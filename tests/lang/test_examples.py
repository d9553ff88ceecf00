"""The examples' programs on a toy engine: they run, share what they should, and give what they say they give."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runtime.engine import Engine
from tests.lang.engines import toy_engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine(n_pages=8192) as engine:
        yield engine


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in [path.stem for path in EXAMPLES.glob("*.py")]:
        sys.modules.pop(name, None)


def test_agent_tools(engine: Engine, example: Any) -> None:
    agent, report = example("agent_tools"), example("report")
    result = agent.agent.run(engine, questions=agent.QUESTIONS)
    assert len(result.value) == len(agent.QUESTIONS)
    assert result["result"].tool in agent.TOOLS
    assert result.totals.hit_rate >= 0.99
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show_transcript(console, tuple(result.record.branches["main"][1]))
    report.show_requests(console, result.record.events)
    report.show_totals(console, {"run": result.totals})
    text = console.export_text()
    assert "You answer questions" in text
    assert "reused of reusable" in text


def test_the_agents_tools_work(example: Any) -> None:
    agent = example("agent_tools")
    assert agent.multiply(12, 17) == 204
    assert agent.convert(26, "mile", "kilometre") == "41.8 kilometre"
    assert agent.weekday(20, 7, 1969) == "Sunday"


def test_tree_of_thought(engine: Engine, example: Any) -> None:
    thought = example("tree_of_thought")
    result = thought.tree_of_thought.run(engine, task=thought.TASK)
    assert len(result.value) == 2
    assert result.totals.requests == 2 * (3 + 3 * 2)
    assert result.totals.hit_rate >= 0.99
    thought.show(Console(file=open("/dev/null", "w")), result)  # noqa: SIM115


def test_self_consistency(engine: Engine, example: Any) -> None:
    votes = example("self_consistency")
    result = votes.vote.run(engine, question=votes.QUESTION, n=5)
    assert sum(result.value.values()) == 5
    assert result.totals.hit_rate >= 0.99


def test_batch_extraction(engine: Engine, example: Any) -> None:
    extraction = example("batch_extraction")
    batch = extraction.extract.run_batch(engine, extraction.TEXTS, on_error="return", progress=False)
    assert len(batch) == len(extraction.TEXTS)
    for result in batch:
        assert isinstance(result, Exception) or isinstance(result.value, extraction.Ticket)
    assert batch.totals.hit_rate >= 0.99


def test_debate(engine: Engine, example: Any) -> None:
    debates = example("debate")
    result = debates.debate.run(engine, document=debates.DOCUMENT, rounds=2)
    assert [name for name, _ in result.value] == [*debates.AGENTS] * 2
    assert "summary" in result
    assert result.totals.hit_rate >= 0.99


def test_judge(engine: Engine, example: Any) -> None:
    judges = example("judge")
    result = judges.judge.run(engine, question=judges.QUESTION, answers=judges.ANSWERS)
    assert sum(result.value) == pytest.approx(len(judges.ANSWERS) / 2)
    assert result.totals.messages == 1
    assert result.totals.hit_rate >= 0.99


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_a_page_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 100
