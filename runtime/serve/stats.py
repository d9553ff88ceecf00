"""The scheduler's numbers, flat and under stable names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.errors import RametError

if TYPE_CHECKING:
    from runtime.serve.context import Serving

TIMEOUT_S = 1.0


class LatestNumbers:
    """What the scheduler said last, and how long ago: all there is to show while it is busy with a long step."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self._at = time.monotonic()

    def keep(self, numbers: dict[str, float]) -> None:
        self._numbers, self._at = numbers, time.monotonic()

    def told(self) -> dict[str, float]:
        """The numbers with their age, which is that of the server while there are none."""
        return {**self._numbers, "stats_age_seconds": time.monotonic() - self._at}


async def scheduler_numbers(serving: Serving) -> dict[str, float]:
    """One `stats` call, flattened. The latest numbers if the scheduler does not answer: a scrape must never hang."""
    with contextlib.suppress(TimeoutError, RametError):
        async with asyncio.timeout(TIMEOUT_S):
            serving.latest.keep(named(flatten(await serving.generator.call("stats")), serving))
    return serving.latest.told()


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested numbers under joined names: {"plan_s": {"p50": 1}} gives plan_s_p50."""
    flat: dict[str, float] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{prefix}{key}_")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            flat[f"{prefix}{key}"] = item
    return flat


def named(flat: dict[str, float], serving: Serving) -> dict[str, float]:
    """With the names that dashboards read, derived where the scheduler does not give them itself."""
    pool_tokens = serving.pool.n_pages * serving.pool.page_size
    page = serving.pool.page_size
    free = flat.get("cache_free", flat.get("free", serving.pool.n_pages))
    used = (serving.pool.n_pages - free) * page
    prompt = flat.get("prompt_tokens", 0.0)
    derived = {
        "pool_tokens": float(pool_tokens),
        "used_tokens": float(used),
        "pool_usage": used / pool_tokens if pool_tokens else 0.0,
        "hit_rate": flat.get("reused", 0.0) / prompt if prompt else 0.0,
        "evicted_tokens": flat.get("cache_evicted", flat.get("evicted", 0.0)) * page,
    }
    return {**derived, **flat}
