"""Rules of every stream: errors before the first byte are a status, after it an event; then the end mark."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from runtime.serve.errors import as_ramet_error, openai_body
from runtime.serve.wire import DONE, event

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Iterable(Protocol[T_co]):
    """Anything with `async for`."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...


async def started(source: Iterable[T]) -> AsyncGenerator[T]:
    """`source` with its first item already there, so that what is wrong is raised before any byte is sent."""
    iterator = source.__aiter__()
    first = [item async for item in _one(iterator)]
    return _resumed(first, iterator)


async def _one(iterator: AsyncIterator[T]) -> AsyncIterator[T]:
    with contextlib.suppress(StopAsyncIteration):
        yield await anext(iterator)


async def _resumed(first: list[T], iterator: AsyncIterator[T]) -> AsyncGenerator[T]:
    try:
        for item in first:
            yield item
        async for item in iterator:
            yield item
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


async def errors_as_events(
    chunks: AsyncIterator[bytes],
    last_words: Callable[[Exception], bytes] = lambda error: event(openai_body(as_ramet_error(error))) + DONE,
) -> AsyncIterator[bytes]:
    """`chunks`; an error among them becomes the stream's last words."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield last_words(error)
    finally:
        close: Any = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
