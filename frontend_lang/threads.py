"""Between threads and event loops: plain functions beside a loop, and a thread that waits for one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of another thread and wait for it.

    Whatever ends the wait early (Ctrl-C) cancels the coroutine and is raised once that has given back what it held;
    a second Ctrl-C waits no longer. Raises RuntimeError if the loop is closed.
    """
    ended: Future[T] = Future()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(report)

    def report(task: asyncio.Task[T]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        ended.set_exception(error) if error is not None else ended.set_result(task.result())

    try:
        loop.call_soon_threadsafe(begin)
    except RuntimeError:  # nobody would ever await it
        work.close()
        raise
    try:
        return ended.result()
    except BaseException:
        if not ended.done():
            with contextlib.suppress(Exception):
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                ended.exception()
        raise


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
