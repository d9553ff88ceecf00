"""Plain functions beside an event loop, in threads that cannot hold up the exit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(work: Callable[[], Any], name: str = "ramet-tool") -> Any:
    """Run `work` in a daemon thread: one that never returns can be left behind without holding up the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(_as_exception(error)) if error is not None else done.set_result(value)

    def body() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:  # handed to the awaiting side, whatever it is
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await done


def _as_exception(error: BaseException) -> Exception:
    """Futures carry neither StopIteration nor SystemExit."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
