"""Rules of every stream: errors before the first byte are a status, after it an event; then the end mark."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeVar

from runtime.serve.errors import as_ramet_error, openai_body
from runtime.serve.wire import DONE, event

T = TypeVar("T")


class Feed(Protocol[T]):
    """Where an answer's news come from, as many at a time as there are."""

    async def take(self) -> list[T]:
        """All news since the last call, at least one; none at the end."""
        ...

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        ...


async def started(feed: Feed[T]) -> AsyncGenerator[T]:
    """The feed's items, the first already there, so that what is wrong is raised before any byte is sent."""
    return items(feed, await feed.take())


async def items(feed: Feed[T], news: list[T]) -> AsyncGenerator[T]:
    """`news`, then whatever else the feed gives; closed with the feed."""
    try:
        while news:
            for item in news:
                yield item
            news = await feed.take()
    finally:
        feed.close()


def openai_words(error: Exception) -> bytes:
    """The last words of a stream in OpenAI's dialect."""
    return event(openai_body(as_ramet_error(error))) + DONE
