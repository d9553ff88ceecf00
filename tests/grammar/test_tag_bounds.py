"""No structural tag holds up what is beside it: its counts are bounded before any engine sees them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.limits import Limits
from runtime.grammar.prepare import prepare
from runtime.grammar.service import CompileService
from runtime.messages import GrammarSpec

AB = {"type": "const_string", "value": "ab"}


def tag(content: Any) -> GrammarSpec:
    return GrammarSpec(kind="structural_tag", spec=json.dumps({"type": "structural_tag", "format": content}))


def repeat(low: Any, high: Any, content: Any = AB) -> dict[str, Any]:
    return {"type": "repeat", "min": low, "max": high, "content": content}


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (repeat(100_000_000, 100_000_000), "/format/min"),
        (repeat(0, 10_001), "/format/max"),
        (repeat(101, 101, repeat(100, 100)), "/format/content"),
        (repeat(3, 2), "/format/max"),
        (repeat(-1, 2), "/format/min"),
        (repeat("1", 2), "/format/min"),
        ({"type": "repeat", "content": AB}, "/format/min"),
        ({"type": "repeat", "min": 1, "max": 2}, "/format/content"),
        ({"type": "any_text", "max_chars": 1 << 40}, "/format/max_chars"),
        ({"type": "const_string", "value": 5}, "/format/value"),
        ({"type": "sequence", "elements": []}, "/format/elements"),
        ({"type": "or", "elements": []}, "/format/elements"),
        ({"type": "star"}, "/format/content"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_refused_names_its_place(content: Any, where: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{where}'") as caught:
        prepare(tag(content), "auto", Limits())
    assert caught.value.param == "structural_tag"


@pytest.mark.parametrize(
    "content", [repeat(10_000, 10_000), repeat(2, -1), repeat(100, 100, repeat(100, 100))], ids=str
)
def test_what_is_taken_is_tried_aside_and_soon_compiled(service: CompileService, content: Any) -> None:
    assert not prepare(tag(content), "auto", Limits()).cheap
    start = time.monotonic()
    cursor = service.compile_async(tag(content)).result(60).cursor()
    assert time.monotonic() - start < 20
    assert cursor.forced_tokens(8)
