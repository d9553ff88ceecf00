"""What agents say about their return, and how it is noted on the nodes they leave behind.

All of it is soft: a wrong hint costs hits, never correctness, and an unpinned page can always be evicted.
"""

from __future__ import annotations

import math
from typing import Protocol

from radix.tree import Node, RadixTree

MAX_EXPECT_S = 3600.0
MAX_RETAIN_S = 3600.0
MAX_LEVEL = 100
AWAIT_S = 60.0  # how long the expected children of a request may keep its end
STEP_S = 5.0  # how long each step that a program has left does so
NEVER = math.inf


class HintsLike(Protocol):
    """Advice of one request; `runtime.messages.Hints` has this shape."""

    @property
    def program_id(self) -> str | None: ...
    @property
    def expect_return_s(self) -> float | None: ...
    @property
    def final(self) -> bool: ...
    @property
    def retain_ttl_s(self) -> float | None: ...
    @property
    def retain_priority(self) -> int: ...
    @property
    def expected_fanout(self) -> int: ...
    @property
    def depth(self) -> int: ...


def note(
    tree: RadixTree, end: Node, program: object, hints: HintsLike | None, now: float, usual: float | None = None
) -> list[Node]:
    """Write a finished request's hints on its path, `end` up; returns the nodes besides `end` whose worth fell.

    `usual`: seconds until the program is back if it is as always, for one that does not say.

    When the program returns (`back_at`) is noted on the nodes that are its alone: what others use too is not
    its to condemn, or to prolong. A final program condemns every branch it leaves, not only this path. A
    retention holds for the whole path, whoever uses it; expected children hold its end until so many have come,
    and steps that are left hold it until the next has come.
    """
    own = [node for node in tree.chain(end) if node.program == program]
    if hints is None:
        for node in own:
            node.back_at = None
        return []
    if hints.retain_ttl_s is not None or hints.retain_priority:
        _retain(tree, end, hints, now)
    if hints.final:
        return _condemn(own[-1]) if own else []
    if hints.expected_fanout > 0:
        end.awaited, end.await_until = hints.expected_fanout, now + AWAIT_S
    elif holds_next(hints):
        end.awaited, end.await_until = 1, now + min(hints.depth * STEP_S, AWAIT_S)
    wait = usual if hints.expect_return_s is None else hints.expect_return_s
    for node in own:
        node.back_at = None if wait is None else now + min(max(wait, 0.0), MAX_EXPECT_S)
    return []


def holds_next(hints: HintsLike) -> bool:
    """True if `depth` is what the end is kept by: nothing said already tells more of who comes and when."""
    return hints.depth > 0 and not (hints.final or hints.expected_fanout or hints.expect_return_s is not None)


def retain_level(node: Node, now: float) -> int:
    """The node's retention priority while it lasts, else 0."""
    return node.retain_level if now < node.retain_until else 0


def awaited(node: Node, now: float) -> bool:
    """True while requests are expected to continue from the node's end."""
    return node.awaited > 0 and now < node.await_until


def _condemn(top: Node) -> list[Node]:
    """Everything below a node that one program alone used is that program's too."""
    nodes, stack = [], [top]
    while stack:
        nodes.append(node := stack.pop())
        node.back_at, node.awaited = NEVER, 0
        stack.extend(node.children.values())
    return nodes


def _retain(tree: RadixTree, end: Node, hints: HintsLike, now: float) -> None:
    ttl = MAX_RETAIN_S if hints.retain_ttl_s is None else min(max(hints.retain_ttl_s, 0.0), MAX_RETAIN_S)
    level = max(-MAX_LEVEL, min(hints.retain_priority or 1, MAX_LEVEL))
    for node in tree.chain(end):
        if level >= node.retain_level or now >= node.retain_until:
            node.retain_level, node.retain_until = level, now + ttl
