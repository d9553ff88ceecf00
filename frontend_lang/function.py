"""`@rt.function`: what makes a Python function a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from frontend_lang.batch import Batch
from frontend_lang.errors import BackendLost, InvalidPiece, NotReady, ProgramError, Where, caller
from frontend_lang.ir import Call
from frontend_lang.record import Record, Totals
from frontend_lang.run import Run
from frontend_lang.session import Batcher, Prepared, prepare
from frontend_lang.state import State
from frontend_lang.values import Info
from runtime.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")
OPTIONS = ("temperature", "seed", "deadline")
MAX_THREADS = 64


class Result(Generic[R]):
    """A finished run. `value` is what the function returned; `result["name"]` reads a variable of the main branch."""

    def __init__(self, value: R, run: Run) -> None:
        self.value = value
        self._state = run.main
        self.record: Record = run.record

    def __getitem__(self, name: Any) -> Any:
        return self._state._var(name).future.result()

    def __contains__(self, name: str) -> bool:
        return name in self._state

    @property
    def text(self) -> str:
        """The whole text of the main branch."""
        return self._state._text()

    @property
    def totals(self) -> Totals:
        """What the run cost, in requests, tokens and seconds."""
        return self.record.totals()

    def info(self, name: Any) -> Info:
        return self._state._var(name).info

    def names(self) -> list[str]:
        return self._state.names()

    def save_trace(self, path: str | Path) -> Path:
        """Write the run's record as one self-contained HTML page."""
        from frontend_lang.trace_page import save

        return save(self.record, path)

    def __repr__(self) -> str:
        return f"Result(value={self.value!r}, names={self.names()})"


class Program(Generic[P, R]):
    """A program. Call it inside another one (`s += program(x=1)`); run it with `run`, `arun` or `run_batch`.

    The target of a run is an Engine, a backend, or the URL of a server. Options of a run, reserved as argument names:
    `temperature` (of gens that give none; default 0), `seed` (every gen's own stream follows from it and from its
    place in the program) and `deadline` (seconds).
    """

    def __init__(self, fn: Callable[..., Any], name: str | None = None) -> None:
        if not callable(fn):
            raise InvalidPiece(f"@rt.function takes a function; got {type(fn).__name__}.")
        self.fn = fn
        self.name = name or fn.__name__
        self.signature = inspect.signature(fn)
        self.__doc__ = fn.__doc__
        parameters = list(self.signature.parameters)
        if not parameters:
            raise InvalidPiece(f"Program {self.name!r} needs a first parameter: the state.")
        for taken in set(parameters[1:]) & set(OPTIONS):
            raise InvalidPiece(f"Program {self.name!r} cannot have a parameter {taken!r}: it is an option of the run.")
        self._prefixes: dict[str, str] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        self._check(args, kwargs)
        return Call(self, args, kwargs)

    def __repr__(self) -> str:
        return f"Program({self.name!r})"

    def run(
        self,
        target: Any,
        /,
        *args: Any,
        temperature: float = 0.0,
        seed: int = 0,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> Result[R]:
        """Run to the end in this thread (where a debugger stops in the program's own lines)."""
        self._check(args, kwargs)
        _refuse_loop("run", "arun")
        prepared = self._prepare(target)
        run = self._new(prepared, prepared.batcher(), prepared.loop(), temperature, seed, deadline)
        if inspect.iscoroutinefunction(self.fn):
            value = run.do(run.aexecute(self._body(args, kwargs)))
        else:
            value = run.execute(self._body(args, kwargs))
        return self._result(value, run)

    async def arun(
        self,
        target: Any,
        /,
        *args: Any,
        temperature: float = 0.0,
        seed: int = 0,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> Result[R]:
        """Run on the current event loop (a plain function's body in a thread). Cancelling it cancels every branch."""
        self._check(args, kwargs)
        prepared = self._prepare(target)
        return await self._arun(prepared, prepared.batcher(), args, kwargs, temperature, seed, deadline)

    @asynccontextmanager
    async def start(
        self,
        target: Any,
        /,
        *args: Any,
        temperature: float = 0.0,
        seed: int = 0,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[State]:
        """The main state of a run that goes on in the background: `async for piece in s.stream("answer")`.

        Leaving the block cancels the run at once if it waits for a value or asks for another one; else it comes to its
        end, and its failure is raised.
        """
        self._check(args, kwargs)
        prepared = self._prepare(target)
        loop = asyncio.get_running_loop()
        run = self._new(prepared, prepared.batcher(), loop, temperature, seed, deadline)
        body = asyncio.ensure_future(run.aexecute(self._body(args, kwargs)))
        run.main._expect(body)
        try:
            yield run.main
            run.leave(body)
            await asyncio.wait([body])
            if not body.cancelled():
                body.result()
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)

    def run_batch(
        self,
        target: Any,
        items: Iterable[Any],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        deadline: float | None = None,
        threads: int = MAX_THREADS,
        progress: bool = True,
        on_error: Literal["raise", "return"] = "raise",
    ) -> Batch:
        """Run once for every item (a mapping of arguments, a tuple of them, or the only one), side by side.

        The constant beginning of the program is prefilled once, before any item needs it. Plain functions run in at
        most `threads` threads. `on_error="return"` puts an error in its item's place.
        """
        _refuse_loop("run_batch", "arun_batch")
        prepared = self._prepare(target)
        work = self.arun_batch(
            prepared,
            items,
            temperature=temperature,
            seed=seed,
            deadline=deadline,
            threads=threads,
            progress=progress,
            on_error=on_error,
        )
        try:
            return prepared.wait(work)
        except ProgramError as error:  # refused on the loop, where the caller's line is not known
            error.place(self._here())
            raise

    async def arun_batch(
        self,
        target: Any,
        items: Iterable[Any],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        deadline: float | None = None,
        threads: int = MAX_THREADS,
        progress: bool = True,
        on_error: Literal["raise", "return"] = "raise",
    ) -> Batch:
        """`run_batch` for async code."""
        from frontend_lang.batch import run_items
        from frontend_lang.compiler import prefetch

        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise InvalidPiece(f"threads must be a positive integer; got {threads!r}.", self._here())
        if on_error not in ("raise", "return"):
            raise InvalidPiece(f"on_error must be 'raise' or 'return'; got {on_error!r}.", self._here())
        calls = [self._item(item) for item in items]
        for args, kwargs in calls:
            self._check(args, kwargs)
        prepared = self._prepare(target)
        batcher = prepared.batcher()
        began = time.monotonic()
        shared = (await prefetch(self, prepared, calls, batcher))[1] if len(calls) > 1 else None

        async def one(index: int) -> Any:
            args, kwargs = calls[index]
            return await self._arun(prepared, batcher, args, kwargs, temperature, seed + index, deadline)

        plain = not inspect.iscoroutinefunction(self.fn)
        results = await run_items(
            one,
            len(calls),
            limit=threads if plain else 0,
            label=self.name,
            progress=progress,
            raising=on_error == "raise",
        )
        return Batch(results, shared, batcher.n_messages, time.monotonic() - began)

    def prefetch(self, target: Any) -> int:
        """Have the program's constant beginning computed and cached, before arguments are there.

        Returns its length in tokens.
        """
        _refuse_loop("prefetch", "aprefetch")
        prepared = self._prepare(target)
        return prepared.wait(self.aprefetch(prepared))

    async def aprefetch(self, target: Any) -> int:
        """`prefetch` for async code."""
        from frontend_lang.compiler import prefetch

        return (await prefetch(self, self._prepare(target)))[0]

    def explain(self, target: Any = None, /, *args: Any, **kwargs: Any) -> str:
        """The compiled program as text: what is constant, what is generated, what is shared; with token counts."""
        from frontend_lang.explain import explain

        return explain(self, target, args, kwargs)

    def draw(self, target: Any = None, /, *args: Any, **kwargs: Any) -> str:
        """The compiled program as an SVG image."""
        from frontend_lang.draw import draw

        return draw(self, target, args, kwargs)

    # ---- inside -------------------------------------------------------------------------------------------

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            self.signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise InvalidPiece(f"Program {self.name!r}: {error}.", self._here()) from error

    def _here(self) -> Where:
        return Where(self.name, "main", *caller())

    def _prepare(self, target: Any) -> Prepared:
        try:
            return prepare(target)
        except ProgramError as error:
            error.place(self._here())
            raise
        except Unavailable as error:
            raise BackendLost(str(error), self._here()) from error

    def _item(self, item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(item, Mapping):
            return (), dict(item)
        return (item, {}) if isinstance(item, tuple) else ((item,), {})

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[State], Any]:
        if inspect.iscoroutinefunction(self.fn):
            fn: Callable[..., Any] = self.fn

            async def body(state: State) -> Any:
                return await fn(state, *args, **kwargs)

            return body
        return lambda state: self.fn(state, *args, **kwargs)

    def _new(
        self,
        prepared: Prepared,
        batcher: Batcher,
        loop: asyncio.AbstractEventLoop,
        temperature: float,
        seed: int,
        deadline: float | None,
    ) -> Run:
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 100:
            raise InvalidPiece(f"temperature must be a number from 0 to 100; got {temperature!r}.", self._here())
        if deadline is not None and (not isinstance(deadline, int | float) or deadline <= 0):
            raise InvalidPiece(f"deadline must be a positive number of seconds; got {deadline!r}.", self._here())
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidPiece(f"seed must be an integer; got {seed!r}.", self._here())
        return Run(self.name, prepared, batcher, loop, temperature=float(temperature), seed=seed, deadline=deadline)

    async def _arun(
        self,
        prepared: Prepared,
        batcher: Batcher,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        temperature: float,
        seed: int,
        deadline: float | None,
    ) -> Result[R]:
        run = self._new(prepared, batcher, asyncio.get_running_loop(), temperature, seed, deadline)
        return self._result(await run.aexecute(self._body(args, kwargs)), run)

    def _result(self, value: Any, run: Run) -> Result[R]:
        run.record.messages = run.batcher.n_messages
        return Result(value, run)


@overload
def function(fn: Callable[Concatenate[State, P], Coroutine[Any, Any, R]]) -> Program[P, R]: ...
@overload
def function(fn: Callable[Concatenate[State, P], R]) -> Program[P, R]: ...
def function(fn: Callable[..., Any]) -> Program[Any, Any]:
    """Make a function over a state, plain or async, a program."""
    return Program(fn)


def _refuse_loop(name: str, instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise NotReady(f"`{name}` would block the running event loop: use `await {instead}(...)`.")
