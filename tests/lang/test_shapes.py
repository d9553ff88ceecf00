"""The benchmark's nine programs, both ways, on a toy server: they do the same work, and ours shares all it can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ramet as rt
from bench.program_shapes import SHAPES
from bench.programs import by_dsl, by_hand, flush
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
    flush(url)
    ours = by_dsl(rt.HttpBackend(url), shape, "DSL")
    flush(url)
    theirs = by_hand(url, shape)
    assert ours.hit_rate is not None
    assert ours.hit_rate >= 0.99
    if shape != "judge with select":  # by hand, a judge samples a token
        assert abs(ours.generated - theirs.generated) <= 0.25 * theirs.generated
    assert ours.prefilled / ours.prompt <= 1.05 * theirs.prefilled / theirs.prompt + 0.02 or shape == "chain"
