"""What a monitor sees of a scheduler that is too busy to answer, or gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime.errors import Unavailable
from tests.serve.scripted import Served, serve

STATS = {"running": 3, "waiting": 2, "cache": {"free": 10}}


async def gauges(served: Served) -> dict[str, float]:
    async with served.http() as http:
        lines = (await http.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(("ramet_scheduler_", "sglang:num_running")))
    return {name.partition("{")[0]: float(value) for name, value in pairs}


def silent(served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    async def call(op: str, **args: Any) -> Any:
        if error is not None:
            raise error
        await asyncio.sleep(60)

    monkeypatch.setattr(served.client, "call", call)


@pytest.mark.parametrize("error", [None, Unavailable("The scheduler died.")], ids=["busy", "dead"])
async def test_the_last_numbers_are_shown_with_their_age(monkeypatch: pytest.MonkeyPatch, error: Exception | None):
    monkeypatch.setattr("runtime.serve.stats.TIMEOUT_S", 0.05)
    served = serve()
    served.client.replies["stats"] = STATS
    fresh = await gauges(served)
    assert fresh["ramet_scheduler_running"] == fresh["sglang:num_running_reqs"] == 3
    assert fresh.pop("ramet_scheduler_stats_age_seconds") < 0.05
    silent(served, monkeypatch, error)
    await asyncio.sleep(0.05)
    stale = await gauges(served)
    assert stale.pop("ramet_scheduler_stats_age_seconds") >= 0.05
    assert stale == fresh


async def test_a_scheduler_that_never_answered_has_an_age_and_no_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.serve.stats.TIMEOUT_S", 0.05)
    served = serve()
    silent(served, monkeypatch, None)
    assert list(await gauges(served)) == ["ramet_scheduler_stats_age_seconds"]
