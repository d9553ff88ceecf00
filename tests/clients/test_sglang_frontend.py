"""SGLang's own frontend, unmodified, against our server: its `RuntimeEndpoint` runs the benchmark's programs.

Needs an interpreter with `sglang` (the wheel alone, and what its import asks for; no GPU): this one, or the one that
the environment variable SGLANG_PYTHON names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ramet as rt
from bench.program_runs import Foreign, flush
from bench.program_texts import SMALL
from tests.lang.engines import toy_engine, toy_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_engine(n_pages=8192) as engine, toy_server(engine) as url:
        yield url


def test_every_program_it_can_express(url: str) -> None:
    backend = rt.HttpBackend(url)
    foreign = Foreign(Path(os.environ.get("SGLANG_PYTHON", sys.executable)), url, SMALL)
    try:
        assert len(foreign.shapes) == 8
        for shape in foreign.shapes:
            flush(url)
            measure = foreign.measure(backend, shape)
            assert measure.generated > 0 or shape == "judge with select"
            assert measure.hit_rate >= 0.95
    finally:
        foreign.close()
