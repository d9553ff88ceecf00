"""Pages that are not full yet: how they are shown to others, adopted, lengthened, filled and given up.

Such a page is a tail leaf of the tree. While a request appends to it, the request's lease holds it as its `leaf`;
others copy from it. All of it that the tree shows is written by steps planned before, or by the one being planned.
"""

from __future__ import annotations

from radix.lease import Lease
from radix.pages import REQUEST, TREE, Ids
from radix.store import COMMITTED, PageStore
from radix.tree import Node


class Tails:
    """The life of tail leaves, for PrefixCache alone."""

    def __init__(self, store: PageStore) -> None:
        self._store, self._tree = store, store.tree

    def show(self, lease: Lease, rest: bytes, pages: Ids, step: int, now: float) -> None:
        """Let others copy `rest` (less than a page, after the lease's whole pages), which `step` completes.

        The page becomes the tree's and the request goes on in it. Nothing happens where a sibling has the tokens.
        """
        if not rest or self._tree.covers(lease.node, rest):
            return
        leaf = lease.leaf
        if leaf is not None:
            if len(rest) > len(leaf.data):
                self._extend(leaf, rest, step)
            return
        leaf = self._hang(lease, rest, pages, step)
        leaf.appender, lease.leaf = lease, leaf
        self._tree.pin(leaf, lease.node, now, lease.program)
        self._store.drop_shorter_tail(leaf)

    def leave(self, lease: Lease, rest: bytes, pages: Ids, now: float) -> Node | None:
        """Leave the partial page of a request that ends; None if there is none or the tree has its tokens."""
        if not rest or self._tree.covers(lease.node, rest):
            return None
        leaf = self._hang(lease, rest, pages, COMMITTED)
        self._tree.touch(leaf, lease.program, now)
        self._store.drop_shorter_tail(leaf)
        self._store.heap.offer(leaf)
        return leaf

    def lengthen(self, lease: Lease, rest: bytes) -> None:
        """Show the tokens appended to the lease's leaf to everyone, unless a sibling shows them already."""
        leaf = lease.leaf
        assert leaf is not None
        if len(rest) > len(leaf.data) and not self._tree.covers(lease.node, rest):
            self._extend(leaf, rest, COMMITTED)

    def fill(self, lease: Lease, page: bytes) -> None:
        """The lease's leaf is a full page now: it becomes a normal node and the lease moves onto it."""
        leaf = lease.leaf
        assert leaf is not None
        self._tree.rewrite(leaf, page)
        leaf.appender, lease.leaf = None, None
        lease.node = leaf  # pinned since it became the lease's
        lease.n_tokens += self._tree.page_size
        self._store.drop_shorter_tail(leaf)

    def disown(self, lease: Lease) -> None:
        """Give up the lease's leaf, which stays in the tree unless a sibling holds all its tokens."""
        leaf = lease.leaf
        if leaf is None:
            return
        leaf.appender, lease.leaf = None, None
        self._tree.unpin(leaf, lease.node)
        self.let_go(leaf, quarantine=True)  # this request's rows may still write there

    def let_go(self, node: Node, *, quarantine: bool = False) -> None:
        """A hold on the node ended: it may be evicted now, and is dropped if a sibling has all its tokens."""
        if node.evictable and self._tree.redundant(node):
            self._store.drop_redundant(node, quarantine=quarantine)
        else:
            self._store.heap.offer(node)

    # -- inside ------------------------------------------------------------------------------------------------

    def _hang(self, lease: Lease, rest: bytes, pages: Ids, step: int) -> Node:
        """The request's partial page as a leaf below its whole ones."""
        i = lease.n_tokens // self._tree.page_size
        page = pages[i : i + 1]
        self._store.pool.move(page, REQUEST, TREE)
        self._store.page_step[page] = step
        leaf = self._tree.attach(lease.node, rest, page)
        self._store.heap.unpark(lease.namespace)
        return leaf

    def _extend(self, leaf: Node, rest: bytes, step: int) -> None:
        self._tree.rewrite(leaf, rest)
        self._store.page_step[leaf.pages] = step
        self._store.drop_shorter_tail(leaf)
