"""schemathesis against our own description: no server error, no answer that is not described, and alive after all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.lang.engines import toy_engine, toy_server

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_engine(n_pages=1024) as engine, toy_server(engine, max_batch=8) as url:
        yield url
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/continue_generation").status_code == 200
        flushed = httpx.post(f"{url}/flush_cache?timeout=20", timeout=30)
        assert flushed.status_code == 200, flushed.text
        assert httpx.get(f"{url}/server_info").json()["internal_states"][0]["used_tokens"] == 0


def operations(url: str) -> Iterator[Any]:
    """All that answer. A paused engine answers nobody; routes of other servers are a plain 501, tested elsewhere."""
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        if operation.path != "/pause_generation" and "501" not in operation.definition.raw["responses"]:
            yield operation


def test_every_operation_answers_as_described(url: str) -> None:
    tried = []
    for operation in operations(url):
        tried.append(operation.label)

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            case.validate_response(case.call(timeout=60), checks=CHECKS)

        run()
    assert "POST /v1/chat/completions" in tried
    assert len(tried) > 40
