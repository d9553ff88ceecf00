"""The benchmark's nine programs, by each way, on a toy server: they do the same work, and ours shares all it can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ramet as rt
from bench import program_pressure
from bench.program_runs import by_dsl, by_hand, flush
from bench.program_texts import SHAPES, SMALL
from runtime.engine import Engine
from tests.lang.engines import toy_engine, toy_server


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine(n_pages=8192) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with toy_server(engine) as url:
        yield url


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways(url: str, shape: str) -> None:
    backend = rt.HttpBackend(url)
    flush(url)
    ours = by_dsl(backend, shape, SMALL)
    flush(url)
    theirs = by_hand(url, backend, shape, SMALL, side_by_side=True)
    assert ours.hit_rate >= 0.99
    assert ours.retokenised == 0
    if shape != "judge with select":  # by hand, a judge samples a token
        assert abs(ours.generated - theirs.generated) <= 0.25 * theirs.generated
    assert ours.prefilled / ours.prompt <= 1.05 * theirs.prefilled / theirs.prompt + 0.02 or shape == "chain"


def test_what_could_have_been_reused_by_hand(url: str) -> None:
    backend = rt.HttpBackend(url)
    flush(url)
    first = by_hand(url, backend, "multi-turn", SMALL, side_by_side=False)
    assert 0.9 <= first.hit_rate <= 1.01
    assert first.retokenised == first.optimum > 0


def test_three_searches_at_once_in_half_the_pool_they_need() -> None:
    """Much is evicted and computed again, which of it the clock decides; most is shared all the same."""
    with toy_engine(n_pages=100) as small, toy_server(small) as url:
        backend = rt.HttpBackend(url)
        ours = program_pressure.by_dsl(backend, 3, 3, 2)
        flush(url)
        theirs = program_pressure.by_hand(url, backend, 3, 3, 2)
    assert ours.hit_rate >= 0.9
    assert theirs.hit_rate >= 0.9
