"""What a fork gives: several states side by side, read, joined and raced together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from frontend_lang.errors import BranchCancelled, DeadlineExceeded, InvalidPiece, Where, check_text
from frontend_lang.ir import Gen, Join, Mark, Select, ToolCall
from frontend_lang.state import State

if TYPE_CHECKING:
    from frontend_lang.tools import ToolResult

T = TypeVar("T")
MAX_BRANCHES = 4096


class Branches:
    """The branches of one fork, in order. `branches[i]` and `branches["label"]` are states."""

    def __init__(self, parent: State, states: list[State], labels: tuple[str, ...], deadline: float | None) -> None:
        self._parent = parent
        self._states = states
        self._labels = labels
        self._run = parent._run
        if deadline is not None:
            if not isinstance(deadline, int | float) or deadline <= 0:
                raise InvalidPiece(f"deadline must be a positive number of seconds; got {deadline!r}.", parent._here())
            self._run.call_later(deadline, self._expire, deadline)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __getitem__(self, key: int | str) -> State:
        if isinstance(key, int):
            if not -len(self) <= key < len(self):
                raise InvalidPiece(
                    f"There is no branch {key}; there are {len(self)}, 0 to {len(self) - 1}.", self._parent._here()
                )
            return self._states[key]
        if key not in self._labels:
            raise InvalidPiece(
                f"No branch is named {key!r}; there are {', '.join(self._labels)}.", self._parent._here()
            )
        return self._states[self._labels.index(key)]

    def __setitem__(self, key: int | str, state: State) -> None:
        """What Python calls after `branches[0] += piece`; a branch cannot be replaced by another."""
        if self[key] is not state:
            raise InvalidPiece(f"Branch {key!r} cannot be replaced; append to it with `+=`.", self._parent._here())

    def __iadd__(self, piece: Any) -> Branches:
        """Append the same piece to every branch."""
        for state in self._states:
            state.add(piece)
        return self

    # ---- reading ------------------------------------------------------------------------------------------

    @overload
    def values(self, name: Gen[T]) -> list[T]: ...
    @overload
    def values(self, name: Select) -> list[str]: ...
    @overload
    def values(self, name: ToolCall) -> list[ToolResult]: ...
    @overload
    def values(self, name: str) -> list[Any]: ...
    def values(self, name: Any) -> list[Any]:
        """The value of `name` on every branch, in order."""
        return [state[name] for state in self._states]

    @overload
    async def gather(self, name: Gen[T]) -> list[T]: ...
    @overload
    async def gather(self, name: Select) -> list[str]: ...
    @overload
    async def gather(self, name: ToolCall) -> list[ToolResult]: ...
    @overload
    async def gather(self, name: str) -> list[Any]: ...
    async def gather(self, name: Any) -> list[Any]:
        """`values` for async programs."""
        self._run.kick()
        return [await state.get(name) for state in self._states]

    # ---- ending -------------------------------------------------------------------------------------------

    def join(self, sep: str = "") -> None:
        """Append to the parent what each branch added, in order, `sep` between: text as text, generated ids as ids."""
        if not isinstance(sep, str):
            raise InvalidPiece(f"sep must be a string; got {type(sep).__name__}.", self._parent._here())
        check_text(sep, "sep", self._parent._here())
        futures = []
        for state in self._states:
            future = self._run.new_future()
            state._push(Mark(), data=[future])
            futures.append(future)
        self._parent._push(Join(tuple(state.name for state in self._states), sep), data=futures)

    def race(self, k: int = 1) -> list[State]:
        """Wait for the first `k` branches to finish and cancel the rest. Branches that fail do not count."""
        self._check_k(k)
        winners: list[State] = self._run.do(self._race(k, self._parent._here()))
        return winners

    async def arace(self, k: int = 1) -> list[State]:
        """`race` for async programs."""
        self._check_k(k)
        return await self._race(k, self._parent._here())

    async def _race(self, k: int, where: Where) -> list[State]:
        self._run.kick()
        await asyncio.sleep(0)
        waiting = {asyncio.ensure_future(_finished(state)): state for state in self._states}
        winners: list[State] = []
        failed: list[State] = []
        try:
            while waiting and len(winners) < k:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for state in sorted((waiting.pop(task) for task in done), key=self._states.index):
                    (failed if state._error is not None else winners).append(state)
        finally:
            for task in waiting:
                task.cancel()
            for state in self._states:
                if state not in winners[:k]:
                    if state._error is not None:
                        self._run.told.append(state._error)
                    lost = replace(where, branch=state.name)
                    state._cancel(BranchCancelled(f"The branch lost a race for {k}.", lost))
                    state._closed = "The branch lost a race."
        if len(winners) < k:
            raise failed[0]._error or BranchCancelled("No branch was left to win the race.", where)
        return winners[:k]

    def cancel(self) -> None:
        """Cancel every branch that is not finished."""
        self._run.soon(self._cancel_all, "The branch was cancelled.")

    def __enter__(self) -> Branches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._run.soon(self._cancel_all, "The branch's scope ended with an error.")
        elif not self._run.on_loop():
            self._run.do(self._finish())
        self._close()

    async def __aenter__(self) -> Branches:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None:
            self._cancel_all("The branch's scope ended with an error.")
        else:
            await self._finish()
        self._close()

    async def _finish(self) -> None:
        """Wait for every branch, then raise what failed and nobody has seen. Who cancelled a branch, by a deadline,
        a race or `cancel`, knows: what it did not finish raises where it is read."""
        self._run.kick()
        for state in self._states:
            await _finished(state)
        for state in self._states:
            if state._error is not None and not self._run.seen(state._error):
                self._close()
                self._run.told.append(state._error)
                raise state._error

    def _close(self) -> None:
        for state in self._states:
            state._closed = state._closed or "The branch is used after its scope has ended."

    def _cancel_all(self, why: str) -> None:
        for state in self._states:
            state._cancel(BranchCancelled(why, state._place()))

    def _expire(self, deadline: float) -> None:
        for state in self._states:
            late = f"The branch did not finish within {deadline:g} s."
            state._cancel(DeadlineExceeded(late, state._place()))

    def _check_k(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self._states):
            raise InvalidPiece(
                f"race takes a number of winners from 1 to {len(self._states)}; got {k!r}.", self._parent._here()
            )


async def _finished(state: State) -> None:
    """Until the branch has nothing queued, or has failed."""
    while state._task is not None and not state._task.done():
        await asyncio.wait([state._task])


def branch_names(n: int | Iterable[str], where: Where) -> tuple[str, ...]:
    """Labels of a fork; raises InvalidPiece for none, too many or equal ones."""
    if isinstance(n, bool) or (isinstance(n, int) and not 1 <= n <= MAX_BRANCHES):
        raise InvalidPiece(f"A fork makes 1 to {MAX_BRANCHES} branches; got {n!r}.", where)
    if isinstance(n, int):
        return tuple(str(i) for i in range(n))
    labels = tuple(n) if not isinstance(n, str) and hasattr(n, "__iter__") else ()
    if not labels or len(labels) > MAX_BRANCHES or not all(isinstance(label, str) for label in labels):
        raise InvalidPiece(f"fork takes a number or a list of names; got {n!r}.", where)
    for index, label in enumerate(labels):
        if not label:
            raise InvalidPiece(f"The name of a branch cannot be empty; name {index} is, of {list(labels)}.", where)
        check_text(label, f"The name of branch {index}", where)
    if len(set(labels)) != len(labels):
        raise InvalidPiece(f"fork got two branches of one name: {list(labels)}.", where)
    return labels
