"""The nodes of a program: what the constructs make, what a trace holds, what the driver executes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from frontend_lang.errors import Where
from runtime.messages import GrammarSpec
from runtime.params import SamplingParams

if TYPE_CHECKING:
    from frontend_lang.tools import Tool

T = TypeVar("T")
Score = Literal["mean", "sum", "greedy", "unconditional"]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Text:
    """Literal text. `special`: special tokens written in it count as such (`rt.raw`); else as plain characters."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class RoleOpen:
    role: str


@dataclass(frozen=True, slots=True)
class RoleClose:
    role: str


@dataclass(frozen=True, slots=True)
class Gen(Generic[T]):
    """One generation. `parse` turns its text into the value; `n` > 1 makes the value a list."""

    name: str
    params: SamplingParams
    temperature: float | None = None  # None: the run's
    grammar: GrammarSpec | None = None
    parse: Callable[[str], T] | None = field(default=None, compare=False)
    n: int = 1
    deadline: float | None = None
    kind: str = "text"  # for explain and traces: text, int, regex, schema ...


@dataclass(frozen=True, slots=True)
class Select:
    """One choice, by the log-probabilities of all choices scored together."""

    name: str
    choices: tuple[str, ...]
    score: Score = "mean"
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A constrained call of one of `tools`, its execution, and its result fed back."""

    name: str
    tools: tuple[Tool, ...]
    params: SamplingParams
    temperature: float | None = None
    timeout_s: float | None = None
    on_error: Literal["feed", "raise"] = "feed"
    before_result: str = "\n"
    after_result: str = "\n"


@dataclass(frozen=True, slots=True)
class Call:
    """A sub-program to run on the state it is added to."""

    program: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fork:
    """The point at which branches leave. `names` are the branches' labels."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Splice what branches added since their fork, in order, with `sep` between them."""

    names: tuple[str, ...]
    sep: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Run time only: tells how far a branch has come (a join waits for it)."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Trace only: from here on the program depends on data."""

    why: str


Node = Text | RoleOpen | RoleClose | Gen[Any] | Select | ToolCall | Call | Fork | Join | Mark | Dynamic


def describe(node: Node) -> tuple[str, str]:
    """A node's kind and what it says, in words."""
    match node:
        case Text():
            return "text", node.text
        case RoleOpen():
            return "role", node.role
        case RoleClose():
            return "end", node.role
        case Gen():
            return "gen", f"{node.name}: {node.kind}" + (f" × {node.n}" if node.n > 1 else "")
        case Select():
            return "select", f"{node.name}: {' | '.join(node.choices)}"
        case ToolCall():
            return "tool", f"{node.name}: {', '.join(tool.name for tool in node.tools)}"
        case Fork():
            return "fork", f"{len(node.names)} branches"
        case Join():
            return "join", ", ".join(node.names)
        case Dynamic():
            return "dynamic", node.why
    return type(node).__name__.lower(), ""


@dataclass(frozen=True, slots=True)
class Step:
    """A node at its place in the source."""

    node: Node
    where: Where
    data: Any = None  # run time only: the Var(s) to settle, the future of a fork


@dataclass(slots=True)
class Tree:
    """The traced steps of one branch. A Fork step's branches are `children[index of the step]`."""

    name: str
    steps: list[Step] = field(default_factory=list)
    children: dict[int, list[Tree]] = field(default_factory=dict)
