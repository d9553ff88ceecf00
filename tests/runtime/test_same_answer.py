"""Warm = cold = alone = crowded = chunked = retracted: how a prompt is served never changes its answer, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ramet as rt
from runtime.messages import TokenLogprob
from tests.runtime.tiny import tiny_engine, write_tiny

N_NEW = 8
TEXT = np.random.default_rng(7).integers(0, 256, 400).tolist()  # every prompt is a prefix of it

Answer = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]
Answers = dict[int, Answer]


def lengths(page_size: int) -> list[int]:
    """Prompt lengths on both sides of the first two page borders."""
    p = page_size
    return sorted({n for n in (p - 1, p, p + 1, 2 * p, 2 * p + 1) if n > 0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(params=[1, 4, 16], ids=lambda p: f"page{p}", scope="module")
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def engine(folder: Path, page_size: int) -> Iterator[rt.Engine]:
    with tiny_engine(folder, page_size=page_size) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(folder: Path, page_size: int) -> Answers:
    """The answers with no cache at all, each alone, one step after another."""
    with tiny_engine(folder, page_size=page_size, prefix_cache=False, overlap=False) as engine:
        return alone(engine, lengths(page_size))


def options(**more: Any) -> dict[str, Any]:
    return {"max_tokens": N_NEW, "temperature": 0, "logprobs": True, "top_logprobs": 3, "ignore_eos": True, **more}


def answer_of(result: rt.GenerateResult) -> Answer:
    assert result.logprobs is not None
    return result.token_ids, result.logprobs


def alone(engine: rt.Engine, sizes: list[int], **more: Any) -> Answers:
    return {n: answer_of(engine.generate(TEXT[:n], **options(**more))) for n in sizes}


def cached(engine: rt.Engine, n: int) -> int:
    return int(engine.generate(TEXT[:n], **options()).usage.cached_tokens)


@contextmanager
def nothing_left(engine: rt.Engine) -> Iterator[None]:
    """Afterwards every page is free or in the tree, and a flush frees them all."""
    yield
    engine.flush()
    cache = engine.stats()["cache"]
    assert (cache["free"] + cache["quarantined"], cache["request"]) == (cache["n_pages"], 0)


def test_cold_is_the_same_as_no_cache(engine: rt.Engine, expected: Answers) -> None:
    for n, answer in expected.items():
        engine.flush()
        assert alone(engine, [n]) == {n: answer}


def test_warm_is_the_same_as_cold_and_computes_one_token(engine: rt.Engine, expected: Answers) -> None:
    engine.flush()
    alone(engine, list(expected))
    for n, answer in expected.items():
        result = engine.generate(TEXT[:n], **options())
        assert answer_of(result) == answer
        assert result.usage.cached_tokens == n - 1
        assert result.usage.prefilled_tokens == 1


def test_a_partly_cached_prompt_is_the_same(engine: rt.Engine, expected: Answers) -> None:
    """Every cached length, not only the whole prompt's, token by token."""
    n = max(expected)
    for seen in range(1, n):
        engine.flush()
        engine.generate(TEXT[:seen], max_tokens=0)
        result = engine.generate(TEXT[:n], **options())
        assert answer_of(result) == expected[n]
        assert result.usage.cached_tokens == seen


def test_a_crowd_is_the_same_as_alone(engine: rt.Engine, expected: Answers, page_size: int) -> None:
    """All lengths at once, twice each, among strangers."""
    engine.flush()
    rng = np.random.default_rng(3)
    strangers = [rng.integers(0, 256, int(size)).tolist() for size in rng.integers(1, 3 * page_size + 2, 6)]
    ours = [TEXT[:n] for n in expected for _ in range(2)]
    with nothing_left(engine):
        results = engine.generate([*strangers[:3], *ours, *strangers[3:]], **options())
    got = [answer_of(result) for result in results[3:-3]]
    assert got == [expected[n] for n in expected for _ in range(2)]


def test_chunked_prefill_is_the_same(folder: Path, page_size: int, expected: Answers) -> None:
    with tiny_engine(folder, page_size=page_size, chunk_tokens=3, max_step_tokens=5) as engine:
        results = engine.generate([TEXT[:n] for n in expected], **options())
        assert [answer_of(one) for one in results] == list(expected.values())
        assert engine.stats()["steps"] > max(expected) // 5


def test_without_overlap_it_is_the_same(folder: Path, page_size: int, expected: Answers) -> None:
    with tiny_engine(folder, page_size=page_size, overlap=False) as engine:
        results = engine.generate([TEXT[:n] for n in expected], **options())
        assert [answer_of(one) for one in results] == list(expected.values())


def test_a_retracted_request_is_the_same(folder: Path, page_size: int) -> None:
    """A pool that holds about half of what the requests grow to."""
    n_new, starts = 40, [0, 50, 100, 150, 200, 250]
    prompts = [TEXT[start : start + 2 * page_size + 1] for start in starts]
    more = options(max_tokens=n_new)
    with tiny_engine(folder, page_size=page_size, prefix_cache=False) as roomy:
        want = [answer_of(roomy.generate(prompt, **more)) for prompt in prompts]
    need = len(prompts) * (2 * page_size + 1 + n_new)
    with tiny_engine(folder, page_size=page_size, kv_pool_tokens=need // 2 // page_size * page_size) as tight:
        with nothing_left(tight):
            results = tight.generate(prompts, **more)
        assert [answer_of(one) for one in results] == want
        assert sum(one.usage.retractions for one in results) > 0


def test_a_seeded_sample_is_the_same_in_any_company(engine: rt.Engine) -> None:
    more = options(temperature=0.9, top_k=40, top_p=0.95, seed=5, frequency_penalty=0.5)
    engine.flush()
    solo = answer_of(engine.generate(TEXT[:20], **more))
    crowd = engine.generate([TEXT[:20], TEXT[30:60], TEXT[:21], TEXT[:20]], **more)
    assert answer_of(crowd[0]) == answer_of(crowd[3]) == solo
    assert crowd[2].token_ids != solo[0]


def test_n_answers_are_those_of_their_seeds(engine: rt.Engine) -> None:
    more = options(temperature=1.0)
    three = engine.generate(TEXT[:20], n=3, seed=11, **more)
    assert [answer_of(one) for one in three] == [
        answer_of(engine.generate(TEXT[:20], seed=seed, **more)) for seed in (11, 12, 13)
    ]
    assert len({one.token_ids for one in engine.generate(TEXT[:20], n=3, **more)}) == 3


def test_prompt_logprobs_are_the_same_warm_and_cold(engine: rt.Engine, expected: Answers) -> None:
    n = max(expected)
    engine.flush()
    cold = engine.generate(TEXT[:n], max_tokens=1, prompt_logprobs_from=0)
    warm = engine.generate(TEXT[:n], max_tokens=1, prompt_logprobs_from=0)
    assert cold.prompt_logprobs is not None
    assert [one.token for one in cold.prompt_logprobs] == TEXT[:n]
    assert cold.prompt_logprobs[0].logprob is None
    assert warm.prompt_logprobs == cold.prompt_logprobs
    part = engine.generate(TEXT[:n], max_tokens=0, prompt_logprobs_from=1)
    assert part.prompt_logprobs == cold.prompt_logprobs[1:]
    assert part.token_ids == ()


def test_forks_share_one_prefill(engine: rt.Engine, page_size: int) -> None:
    """Siblings planned in one step compute their common prefix once."""
    engine.flush()
    before = engine.stats()["prefilled"]
    results = engine.generate([TEXT[:100]] * 4, **options())
    assert len({answer_of(one) for one in results}) == 1
    assert engine.stats()["prefilled"] - before <= 100 + 3 * page_size
