"""A lease: one request's hold on a path of the tree, released once."""

from __future__ import annotations

from typing import NamedTuple

from radix.pages import Ids
from radix.tree import Namespace, Node, RadixTree


class LeaseError(RuntimeError):
    """A lease was used after its release, or in a way its state does not allow."""


class Match(NamedTuple):
    """What a prompt finds in the cache: `n_tokens` in `n_pages` whole pages, and `tail` = (page, r) tokens more.

    `n_loose` of the whole pages nobody holds: until they are leased they count as evictable too.
    """

    n_tokens: int
    n_pages: int
    tail: tuple[int, int] | None
    n_loose: int = 0

    @property
    def total(self) -> int:
        """Tokens that need not be computed."""
        return self.n_tokens + (self.tail[1] if self.tail else 0)


class Tail(NamedTuple):
    """Tokens matched beyond the whole pages: the first `n` slots of `page`.

    Adopted: the page is the request's to append to in place, from slot `n` on; it stays the tree's. Else the
    caller copies the `n` slots into a page of its own; the source stays put until the next plan begins.
    """

    page: int
    n: int
    adopted: bool


class Lease:
    """Pins the path to `node`, and the adopted tail leaf below it. Made and moved by PrefixCache only."""

    __slots__ = ("_tree", "leaf", "n_tokens", "node", "program", "released", "source", "tail")

    def __init__(self, tree: RadixTree, node: Node, program: object = None) -> None:
        self._tree = tree
        self.program = object() if program is None else program  # who uses the path; by default, nobody else
        self.node = node  # the deepest node held; its end is n_tokens
        self.leaf: Node | None = None  # the adopted tail leaf, a child of node
        self.n_tokens = 0  # held as whole pages
        self.tail: Tail | None = None  # as the last acquire or advance found it
        self.source: Node | None = None  # the node whose page a tail that is not adopted lies in
        self.released = False

    @property
    def namespace(self) -> Namespace:
        return self.node.root.namespace

    @property
    def pages(self) -> Ids:
        """The leased whole pages in order, int32 [n_tokens / page_size]; a fresh array."""
        return self._tree.path(self.node)

    @property
    def total(self) -> int:
        """Tokens that acquire or advance found: whole pages and tail."""
        return self.n_tokens + (self.tail.n if self.tail else 0)

    @property
    def anchor(self) -> Node:
        """The deepest node this lease pins."""
        return self.leaf or self.node

    def check(self) -> None:
        """Raise LeaseError if released."""
        if self.released:
            raise LeaseError("this lease was released already")

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.n_tokens} tokens, tail {self.tail}"
        return f"Lease({state})"
