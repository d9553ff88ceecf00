"""Many runs side by side, with a progress bar."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from frontend_lang.record import Event, Record, Totals, add


class Batch(list[Any]):
    """The results of a batch, in the items' order. `totals` adds them up, with what was prefetched for all."""

    def __init__(self, results: list[Any], shared: Event | None, messages: int, wall_s: float) -> None:
        super().__init__(results)
        self._shared = shared
        self._messages = messages
        self._wall_s = wall_s

    @property
    def records(self) -> list[Record]:
        """The records of the items that did not fail."""
        return [result.record for result in self if hasattr(result, "record")]

    @property
    def totals(self) -> Totals:
        """What the batch cost. `optimum` counts sharing inside each run and of the prefetched beginning."""
        return add(self.records, self._shared, self._messages, self._wall_s)


async def run_items(
    one: Callable[[int], Awaitable[Any]], n: int, *, limit: int, label: str, progress: bool, raising: bool
) -> list[Any]:
    """Results of `one(0)` to `one(n-1)`, in order, at most `limit` at a time (0: all).

    The first failure cancels the rest and is raised, or with `raising` off takes its item's place.
    """
    gate = asyncio.Semaphore(limit) if limit else nullcontext()
    bar = _Bar(label, n) if progress and sys.stderr.isatty() else None

    async def guarded(index: int) -> Any:
        async with gate:
            try:
                return await one(index)
            except Exception as error:
                if raising:
                    raise
                return error
            finally:
                if bar is not None:
                    bar.advance()

    tasks = [asyncio.ensure_future(guarded(index)) for index in range(n)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if bar is not None:
            bar.close()


class _Bar:
    """A line on stderr: how many are done, and how long the rest will take."""

    def __init__(self, label: str, n: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(label, total=n)
        self._progress.start()

    def advance(self) -> None:
        self._progress.advance(self._task)

    def close(self) -> None:
        self._progress.stop()
