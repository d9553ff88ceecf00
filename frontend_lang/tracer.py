"""The state a trace runs a program over: it has the face of `State`, records every step, and knows no value."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from frontend_lang.branches import branch_names
from frontend_lang.errors import InvalidPiece, UnknownVariable, Where, caller, check_text
from frontend_lang.holes import OPEN, DataDependent, Hole
from frontend_lang.ir import (
    Call,
    Dynamic,
    Fork,
    Gen,
    Join,
    Node,
    RoleClose,
    RoleOpen,
    Select,
    Step,
    Text,
    ToolCall,
    Tree,
)

MAX_STEPS = 10_000


class _Shared:
    """What all branches of one trace count together."""

    def __init__(self, only_prefix: bool) -> None:
        self.n_steps = 0
        self.only_prefix = only_prefix


class Tracer:
    """A state that records. It has the face of `State`; everything read from it is a hole."""

    def __init__(self, program: str, tree: Tree, parent: Tracer | None = None, *, only_prefix: bool = False) -> None:
        self.name = tree.name
        self.program = program
        self.tree = tree
        self.shared: _Shared = parent.shared if parent else _Shared(only_prefix)
        self._names: dict[str, None] = dict(parent._names) if parent else {}
        self._role: str | None = parent._role if parent else None
        self._n_forks = 0

    def _record(self, node: Node) -> None:
        self.shared.n_steps += 1
        if self.shared.n_steps > MAX_STEPS:
            raise DataDependent("it goes on for very long")
        file, line = caller()
        self.tree.steps.append(Step(node, Where(self.program, self.name, file, line)))
        constant = isinstance(node, RoleOpen | RoleClose | Dynamic) or (
            isinstance(node, Text) and OPEN not in node.text
        )
        if self.shared.only_prefix and not constant:
            raise DataDependent("its constant beginning is over")

    def end(self, why: str) -> None:
        self._record(Dynamic(why))

    # ---- the face of State --------------------------------------------------------------------------------

    def __iadd__(self, piece: Any) -> Tracer:
        self.add(piece)
        return self

    def add(self, piece: Any) -> None:
        if isinstance(piece, str):
            piece = Text(str.__str__(piece))
        if isinstance(piece, Text):
            if piece.text:
                check_text(piece.text, "The text")
                self._record(piece)
        elif isinstance(piece, Gen | Select | ToolCall):
            self._record(piece)
            self._names[piece.name] = None
        elif isinstance(piece, Call):
            self.call(piece.program, *piece.args, **piece.kwargs)
        elif isinstance(piece, list | tuple):
            for one in piece:
                self.add(one)
        else:
            raise InvalidPiece(
                f"A state takes strings, gens, selects, tool calls and programs; got {type(piece).__name__}."
            )

    def call(self, program: Any, *args: Any, **kwargs: Any) -> Any:
        return program.fn(self, *args, **kwargs)

    system = property(lambda self: _Role(self, "system"))
    user = property(lambda self: _Role(self, "user"))
    assistant = property(lambda self: _Role(self, "assistant"))
    tool = property(lambda self: _Role(self, "tool"))

    def __getitem__(self, name: Any) -> Any:
        key = getattr(name, "name", name)
        if key not in self._names:
            raise UnknownVariable(f"Nothing named {key!r} is generated on this branch.")
        return Hole(key)

    async def get(self, name: Any) -> Any:
        return self[name]

    def info(self, name: Any) -> Any:
        return self[name]

    def stream(self, name: Any) -> Any:
        return self[name]

    def text(self) -> Any:
        return Hole("text")

    def wait(self) -> None:
        """Nothing runs in a trace."""

    async def done(self) -> None:
        """Nothing runs in a trace."""

    def names(self) -> list[str]:
        return list(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def fork(self, n: int | Iterable[str] = 2, *, deadline: float | None = None) -> _Branches:
        if isinstance(n, Hole):
            raise DataDependent(f"it forks by {n.label!r}")
        labels = branch_names(n, Where(self.program, self.name))
        self._n_forks += 1
        prefix = "" if self.name == "main" else f"{self.name}."
        suffix = f"@{self._n_forks}" if self._n_forks > 1 else ""
        self._record(Fork(tuple(f"{prefix}{label}{suffix}" for label in labels)))
        trees = [Tree(f"{prefix}{label}{suffix}") for label in labels]
        self.tree.children[len(self.tree.steps) - 1] = trees
        return _Branches(self, [Tracer(self.program, tree, self) for tree in trees], labels)


class _Role:
    """RoleScope's face."""

    def __init__(self, state: Tracer, role: str) -> None:
        self._state = state
        self._role = role

    def __call__(self, *pieces: Any) -> _Role:
        if pieces:
            with self:
                self._state.add(list(pieces))
        return self

    def __enter__(self) -> Tracer:
        self._state._record(RoleOpen(self._role))
        self._state._role = self._role
        return self._state

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self._state._record(RoleClose(self._role))
        self._state._role = None


class _Branches:
    """Branches' face."""

    def __init__(self, parent: Tracer, states: list[Tracer], labels: tuple[str, ...]) -> None:
        self._parent = parent
        self._states = states
        self._labels = labels

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Any:
        return iter(self._states)

    def __getitem__(self, key: int | str) -> Tracer:
        return self._states[key if isinstance(key, int) else self._labels.index(key)]

    def __setitem__(self, key: int | str, state: Tracer) -> None:
        """What Python calls after `branches[0] += piece`."""

    def __iadd__(self, piece: Any) -> _Branches:
        for state in self._states:
            state.add(piece)
        return self

    def values(self, name: Any) -> list[Any]:
        return [Hole(f"{state.name}.{state[name].label}") for state in self._states]

    async def gather(self, name: Any) -> list[Any]:
        return self.values(name)

    def join(self, sep: str = "") -> None:
        self._parent._record(Join(tuple(state.name for state in self._states), sep))

    def race(self, k: int = 1) -> list[Tracer]:
        raise DataDependent(f"who wins the race for {k} is known at run time")

    async def arace(self, k: int = 1) -> list[Tracer]:
        return self.race(k)

    def cancel(self) -> None:
        """Nothing runs in a trace."""

    def __enter__(self) -> _Branches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Nothing to end."""

    async def __aenter__(self) -> _Branches:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Nothing to end."""
