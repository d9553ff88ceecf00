"""The state a program writes to: text, roles, generations, branches, results by name."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from frontend_lang.driver import Driver
from frontend_lang.errors import (
    BranchCancelled,
    InvalidPiece,
    NotReady,
    ProgramError,
    ScopeClosed,
    UnknownVariable,
    Where,
    caller,
    check_text,
)
from frontend_lang.ir import Call, Fork, Gen, Mark, Node, RoleClose, RoleOpen, Select, Step, Text, ToolCall
from frontend_lang.values import Info, TextStream, Var

if TYPE_CHECKING:
    from frontend_lang.branches import Branches
    from frontend_lang.run import Run
    from frontend_lang.tools import ToolResult

T = TypeVar("T")


class RoleScope:
    """A chat message: call it with pieces, or open it with `with`."""

    def __init__(self, state: State, role: str) -> None:
        self._state = state
        self._role = role
        self._written = False

    def __call__(self, *pieces: Any) -> RoleScope:
        """One whole message; without pieces, a scope for `with`."""
        if pieces:
            with self:
                for piece in pieces:
                    self._state.add(piece)
            self._written = True
        return self

    def __enter__(self) -> State:
        if self._written:
            raise InvalidPiece(f"This {self._role} message is written already.", self._state._here())
        self._state.open_role(self._role)
        return self._state

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self._state.close_role()


class State:
    """One branch of a running program. Appending never waits; reading a value waits for that value only.

    In a plain function `s["name"]` blocks until the value is there; in an async one use `await s.get("name")`.
    """

    def __init__(self, run: Run, name: str, parent: State | None = None) -> None:
        self.name = name
        self._run = run
        self._parent = parent
        self._vars: dict[str, Var] = dict(parent._vars) if parent else {}
        self._made: dict[int, Var] = dict(parent._made) if parent else {}  # by construct, which the steps keep alive
        self._role: str | None = parent._role if parent else None
        self._n_forks = 0
        self._expected: dict[str, Var] | None = None  # names read before the program, running elsewhere, defines them
        self._closed: str | None = None
        self._error: BaseException | None = None
        self._driver = Driver(run, name)
        self._steps: list[Step] = []  # everything ever written, for the record
        self._task: asyncio.Task[None] | None = None

    # ---- writing ------------------------------------------------------------------------------------------

    def __iadd__(self, piece: Any) -> State:
        self.add(piece)
        return self

    def add(self, piece: Any) -> None:
        """Append text, a gen, a select, a tool call, a sub-program, or a list of these."""
        if isinstance(piece, str):
            piece = Text(piece)
        if isinstance(piece, Text):
            if piece.text:
                check_text(piece.text, "The text", None if piece.text.isascii() else self._here())
                self._push(piece)
        elif isinstance(piece, Gen | Select | ToolCall):
            self._define(piece)
        elif isinstance(piece, Call):
            self._run.inline(self, piece)
        elif isinstance(piece, list | tuple):
            for one in piece:
                self.add(one)
        else:
            raise InvalidPiece(
                f"A state takes strings, gens, selects, tool calls and programs; got {type(piece).__name__}.",
                self._here(),
            )

    @property
    def system(self) -> RoleScope:
        return RoleScope(self, "system")

    @property
    def user(self) -> RoleScope:
        return RoleScope(self, "user")

    @property
    def assistant(self) -> RoleScope:
        return RoleScope(self, "assistant")

    @property
    def tool(self) -> RoleScope:
        """A tool's message, written by hand; `rt.call` writes one by itself."""
        return RoleScope(self, "tool")

    def open_role(self, role: str) -> None:
        if self._role is not None:
            article = "An" if role == "assistant" else "A"
            raise InvalidPiece(f"{article} {role} message cannot stand inside the {self._role} message.", self._here())
        self._push(RoleOpen(role))
        self._role = role

    def close_role(self) -> None:
        if self._role is not None and self._closed is None:
            self._push(RoleClose(self._role))
        self._role = None

    # ---- reading ------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Gen[T]) -> T: ...
    @overload
    def __getitem__(self, name: Select) -> str: ...
    @overload
    def __getitem__(self, name: ToolCall) -> ToolResult: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: Any) -> Any:
        """The value of a name (or of the construct that made it), waiting for it if need be."""
        var = self._var(name)
        if not var.done:
            if self._run.on_loop():
                raise NotReady(f"{var.name!r} is not there yet: use `await s.get({var.name!r})`.", self._here())
            self._run.kick()
        return self._told_of(lambda: var.future.result())

    @overload
    async def get(self, name: Gen[T]) -> T: ...
    @overload
    async def get(self, name: Select) -> str: ...
    @overload
    async def get(self, name: ToolCall) -> ToolResult: ...
    @overload
    async def get(self, name: str) -> Any: ...
    async def get(self, name: Any) -> Any:
        """The value of a name, for async programs."""
        var = self._var(name)
        self._run.kick()
        try:
            return await var.wait()
        except ProgramError as error:
            self._run.told.append(error)
            raise

    def info(self, name: Any) -> Info:
        """How a value came about: ids, logprobs, scores, finish, usage. Waits like `s[name]`."""
        var = self._var(name)
        try:
            self[name]
        except ProgramError:
            if not var.info.finish:
                raise
        return var.info

    def stream(self, name: Any) -> TextStream:
        """The text of a value (with n > 1, its first sample) as it is made: iterate it with `for`, or `async for` in
        async code. Leaving it early leaves the generation running: to stop that, cancel its scope."""
        var = self._var(name)
        var.follow()
        self._run.kick()
        return TextStream(var, self._run.told)

    def __contains__(self, name: str) -> bool:
        return name in self._vars

    def names(self) -> list[str]:
        """The names defined so far on this branch and before its fork."""
        return list(self._vars)

    def text(self) -> str:
        """Everything on this branch since the program began, once what is queued is done. Blocks."""
        self.wait()
        return self._text()

    def wait(self) -> None:
        """Wait until everything queued on this branch is done; raises what failed."""
        if self._run.on_loop():
            raise NotReady("s.wait() blocks: use `await s.done()`.", self._here())
        self._told_of(lambda: self._run.do(self.done()))

    async def done(self) -> None:
        """`wait` for async programs."""
        self._run.kick()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        if self._error is not None:
            self._run.told.append(self._error)
            raise self._error

    def call(self, program: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a sub-program on this state and return what its function returns (a coroutine if it is async)."""
        return self._run.inline(self, program(*args, **kwargs))

    # ---- branching ----------------------------------------------------------------------------------------

    def fork(self, n: int | Iterable[str] = 2, *, deadline: float | None = None) -> Branches:
        """`n` branches (or one a name) that go on from here, sharing everything so far.

        As a `with` block, the branches end with it: an error cancels them, a normal exit waits for them.
        `deadline`: seconds after which unfinished branches are cancelled.
        """
        from frontend_lang.branches import Branches, branch_names

        labels = branch_names(n, self._here())
        self._n_forks += 1
        prefix = "" if self.name == "main" else f"{self.name}."
        suffix = f"@{self._n_forks}" if self._n_forks > 1 else ""
        full = tuple(f"{prefix}{label}{suffix}" for label in labels)
        futures = [self._run.new_future() for _ in full]
        self._push(Fork(full), data=futures)
        children = [self._run.new_state(name, parent=self) for name in full]
        for child, future in zip(children, futures, strict=True):
            child._driver.start = future
        return Branches(self, children, labels, deadline)

    # ---- inside -------------------------------------------------------------------------------------------

    def _here(self) -> Where:
        file, line = caller()
        return Where(self._run.name, self.name, file, line)

    def _unfinished(self) -> Var | None:
        """The first value of this branch that was asked for and is not there yet."""
        return next((var for var in list(self._vars.values()) if not var.done and var.where.branch == self.name), None)

    def _place(self) -> Where:
        """Where this branch is: what it waits for, else what it wrote last."""
        var = self._unfinished()
        if var is not None:
            return var.where
        if self._steps:
            return self._steps[-1].where
        there = self._parent._place() if self._parent is not None else Where()
        return Where(self._run.name, self.name, there.file, there.line)

    def _define(self, node: Gen[Any] | Select | ToolCall) -> None:
        var = (self._expected or {}).pop(node.name, None) or Var(node.name, self._here())
        self._push(node, data=var)
        self._vars[node.name] = self._made[id(node)] = var

    def _expect(self, body: asyncio.Task[Any]) -> None:
        """Let names be read before they are defined; those that never are fail when the body ends."""
        self._expected = {}
        body.add_done_callback(lambda _: self._give_up())

    def _give_up(self) -> None:
        expected, self._expected = self._expected or {}, None
        for name, var in expected.items():
            why = self._error or UnknownVariable(f"The program ended without defining {name!r}.", var.where)
            var.fail(why)

    def _push(self, node: Node, *, data: Any = None) -> Step:
        where = self._here()
        if self._closed is not None and not isinstance(node, Mark):
            raise ScopeClosed(self._closed, where)
        step = Step(node, where, data)
        if not isinstance(node, Mark):
            self._steps.append(Step(node, where))
        if self._error is not None:
            _settle_step(step, self._error)
        else:
            self._driver.steps.append(step)
            self._run.nudge(self)
        return step

    def _var(self, name: Any) -> Var:
        key = getattr(name, "name", name)
        var = self._vars.get(key) if key is name else self._made.get(id(name), self._vars.get(key))
        if var is None and self._expected is not None and isinstance(key, str):
            return self._expected.setdefault(key, Var(key, self._here()))
        if var is None:
            close = difflib.get_close_matches(str(key), self._vars, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(self._vars) or 'none'}."
            raise UnknownVariable(f"Nothing named {key!r} was generated on this branch.{hint}", self._here())
        return var

    def _told_of(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except ProgramError as error:
            self._run.told.append(error)
            raise

    def _text(self) -> str:
        before = self._parent._text_before(self) if self._parent is not None else ""
        return before + self._driver.context.text

    def _text_before(self, child: State) -> str:
        n = self._run.fork_spans.get(child.name, 0)
        own = "".join(span.text for span in self._driver.context.spans[:n])
        return (self._parent._text_before(self) if self._parent is not None else "") + own

    def _start(self) -> None:
        """On the loop: see that a driver runs if something is queued."""
        if self._error is not None:
            self._fail(self._error)  # pushed by another thread just as it failed
        if self._driver.steps and (self._task is None or self._task.done()) and self._error is None:
            self._task = asyncio.get_running_loop().create_task(self._drive(), name=f"ramet:{self.name}")

    async def _drive(self) -> None:
        try:
            await self._driver.drive()
        except asyncio.CancelledError:
            self._fail(self._error or BranchCancelled("The branch was cancelled.", self._place()))
            raise
        except BaseException as error:  # handed to whoever reads
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing more happens on this branch; everything queued is settled with `error`."""
        if self._error is None:
            self._error = error
        for step in self._driver.steps:
            _settle_step(step, self._error)
        self._driver.steps.clear()
        for var in {*self._vars.values(), *self._made.values()}:  # a name may have hidden an older one's value
            if var.where.branch == self.name:
                var.fail(self._error)

    def _cancel(self, error: BaseException) -> None:
        """On the loop: stop at once, aborting what the runtime is doing for this branch."""
        idle = self._task is None or self._task.done()
        if self._error is None and not (idle and not self._driver.steps):
            self._run.told.append(error)  # whoever cancelled it knows
            self._fail(error)
        self._stop()

    def _stop(self) -> None:
        """Cancel the driver, once: a second time would cut short what it does to abort its requests."""
        if self._task is not None and not self._task.done() and not self._task.cancelling():
            self._task.cancel()


def _settle_step(step: Step, error: BaseException) -> None:
    if isinstance(step.data, Var):
        step.data.fail(error)
    elif isinstance(step.data, list):
        for future in step.data:
            if isinstance(future, asyncio.Future) and not future.done():
                future.set_exception(error)
                future.exception()  # noted: whoever waits gets it
