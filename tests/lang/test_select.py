"""Choosing by joint log-probability, in one message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ramet as rt
from frontend_lang.backend import Abilities
from frontend_lang.errors import InvalidChoices, InvalidPiece, Unsupported
from frontend_lang.select import Rows, Scored, first_difference, greedy, pick, scores
from runtime.messages import unpack_ids
from tests.lang.fake import FakeBackend


def run(backend: FakeBackend, prompt: str, choices: list[str], **options: Any) -> Any:
    @rt.function
    def program(s: rt.State) -> None:
        s += prompt
        s += rt.select("pick", choices, **options)
        s += " then"
        s += rt.gen("more")

    return program.run(backend)


def test_all_choices_are_scored_in_one_message(backend: FakeBackend) -> None:
    result = run(backend, "Q: the cat? A:", [" YES", " NO"])
    assert [len(message) for message in backend.messages] == [1, 1]
    assert all(request.params.max_tokens == 0 for request in backend.messages[0])
    assert result["pick"] == max(result.info("pick").scores, key=result.info("pick").scores.get)
    assert result.text.startswith(f"Q: the cat? A:{result['pick']} then")


@pytest.mark.parametrize("score", ["mean", "sum", "greedy", "unconditional"])
def test_both_spellings_rank_alike(score: str) -> None:
    """ "A:" + " YES" and "A: " + "YES" are the same text, so the same tokens and the same scores."""
    left = run(FakeBackend(), "Q? A:", [" YES", " NO"], score=score)
    right = run(FakeBackend(), "Q? A: ", ["YES", "NO"], score=score)
    assert left["pick"].strip() == right["pick"].strip()
    assert list(left.info("pick").scores.values()) == list(right.info("pick").scores.values())
    assert left.text == right.text


@pytest.mark.parametrize("choices", [["nikon", "nike shoes"], ["nike", "nike shoes"], ["a"], [" ", "\n"], ["é", "ê"]])
def test_choices_that_share_or_contain_each_other(backend: FakeBackend, choices: list[str]) -> None:
    assert run(backend, "A: ", choices)["pick"] in choices


def test_scores_count_from_the_first_differing_token() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    assert first_difference(prompt, [np.array([1, 2, 9]), np.array([1, 2, 3, 4])]) == 2
    assert first_difference(prompt, [np.array([1, 2, 3, 5]), np.array([1, 2, 3, 4])]) == 3
    assert first_difference(prompt, [np.array([1, 2, 3]), np.array([1, 2, 3, 4])]) == 2


def test_methods() -> None:
    short = Scored((5,), (-1.0,), (-0.1,))
    long = Scored((6, 7), (-0.8, -0.8), (-2.0, -2.0))
    assert scores("sum", [short, long]) == [-1.0, -1.6]
    assert scores("mean", [short, long]) == [-1.0, -0.8]
    assert scores("unconditional", [short, long]) == pytest.approx([-0.9, 1.2])
    assert greedy([short, long]) == [-1.0, 0.0]


def test_greedy_follows_shared_beginnings() -> None:
    a = Scored((1, 2), (-0.1, -2.0))
    b = Scored((1, 3, 4), (-0.1, -0.2, -9.0))
    c = Scored((8,), (-0.5,))
    assert max(range(3), key=lambda i: greedy([a, b, c])[i]) == 1


def test_a_temperature_samples_by_seed() -> None:
    values = [-1.0, -1.1, -0.9]
    assert pick(values, 0.0, 1) == 2
    assert len({pick(values, 1.0, seed) for seed in range(40)}) == 3
    assert pick(values, 1.0, 7) == pick(values, 1.0, 7)


def test_cold_and_warm_agree() -> None:
    backend = FakeBackend()
    cold = run(backend, "Q? A:", [" YES", " NO"]).info("pick").scores
    assert run(backend, "Q? A:", [" YES", " NO"]).info("pick").scores == cold


def test_select_first_thing(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.select("pick", ["red", "blue"])
        return s["pick"]

    assert program.run(backend).value in ("red", "blue")
    assert unpack_ids(backend.requests[0].tokens)[0] == 2


@pytest.mark.parametrize("bad", [[], ["a", ""], ["a", "a"], "ab", [1], None])
def test_bad_choices(bad: Any) -> None:
    with pytest.raises(InvalidChoices, match="choices"):
        rt.select("x", bad)
    if bad is not None:
        with pytest.raises(InvalidChoices, match="choices"):
            rt.gen("x", choices=bad)


def test_bad_options() -> None:
    with pytest.raises(InvalidPiece, match="score"):
        rt.select("x", ["a"], score="best")  # type: ignore[arg-type]
    with pytest.raises(InvalidPiece, match="temperature"):
        rt.select("x", ["a"], temperature=float("nan"))


def test_a_backend_that_cannot_score_says_so() -> None:
    with pytest.raises(Unsupported, match=r"fake cannot score.*branch 'main', test_select.py"):
        run(FakeBackend(able=Abilities(scoring=False)), "A:", ["x", "y"])


def rows_of(*choices: list[int], start: int = 1) -> Rows:
    return Rows.of([np.array(ids, np.int32) for ids in choices], start)


def test_choices_of_one_token_are_one_row_that_ends_before_them() -> None:
    rows = rows_of([1, 5], [1, 6], [1, 7])
    assert [(row.ids.tolist(), row.asked) for row in rows.rows] == [([1], [(1, 5), (1, 6), (1, 7)])]
    assert rows.places == [[(0, 0)], [(0, 1)], [(0, 2)]]


def test_what_choices_share_is_read_once_and_their_last_token_never() -> None:
    rows = rows_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 7], [1, 2, 3], [1, 8, 9])
    assert [(row.ids.tolist(), row.asked) for row in rows.rows] == [
        ([1, 2, 3], [(1, 2), (1, 8), (2, 3), (2, 7), (3, 4), (3, 5)]),
        ([1, 8], [(2, 9)]),
    ]
    assert rows.places[2] == [(0, 0), (0, 3)]
    assert rows.places[4] == [(0, 1), (1, 0)]


def test_nothing_predicts_the_first_token_of_all() -> None:
    rows = rows_of([5, 6], [7], start=0)
    assert [(row.ids.tolist(), row.asked) for row in rows.rows] == [([5], [(1, 6)])]
    assert rows.places == [[None, (0, 0)], [None]]


def test_a_choice_scores_the_same_whatever_stands_beside_it(backend: FakeBackend) -> None:
    together = run(backend, "A: ", ["the cat", "the dog", "the", "red"])
    assert len(backend.messages[0]) == 1
    apart = {
        name: run(FakeBackend(), "A: ", [name, "red"]).info("pick").scores[name] for name in ("the cat", "the dog")
    }
    assert {name: together.info("pick").scores[name] for name in apart} == apart


def test_the_choices_with_and_without_their_prompt_travel_together(backend: FakeBackend) -> None:
    run(backend, "A: ", ["red", "blue"], score="unconditional")
    assert [len(message) for message in backend.messages] == [2, 1]
