"""The radix tree: nodes with page-aligned edges, the walk that matches them, and the edits that keep them.

Keys are the little-endian int32 bytes of tokens, so whole edges compare with one memcmp. A node's edge is a
whole number of pages, except that a page not yet full is a node of its own, a *tail leaf*: one page, fewer
than `page_size` tokens, no children. A page is therefore never shared by two nodes. Children are found by the
bytes of their first page; the best match inside a page is one of the two lexicographic neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from radix.pages import Ids

if TYPE_CHECKING:
    from radix.lease import Lease

TOKEN_BYTES = 4
SHARED = object()  # the program of a node that several use
NO_PAGES: Ids = np.zeros(0, np.int32)


class Namespace(NamedTuple):
    """Requests share cached KV only inside one namespace. A tuple, so no spelling of one equals another's."""

    adapter: int = 0  # load id, never a name: a reloaded adapter is another adapter
    salt: str = ""
    weights: int = 0
    media: str = ""


class Node:
    """An edge of tokens and the pages that hold them. `pins` counts the holders of this node or of one below it."""

    __slots__ = (
        "appender",
        "await_until",
        "awaited",
        "back_at",
        "children",
        "data",
        "digests",
        "entry",
        "hits",
        "last_used",
        "order",
        "pages",
        "parent",
        "pins",
        "program",
        "retain_level",
        "retain_until",
        "root",
    )

    def __init__(self, parent: Node | None, data: bytes, pages: Ids) -> None:
        self.parent = parent
        self.data = data
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []  # the keys of children, sorted; unused (empty) when a page is one token
        self.digests: list[bytes] = []  # of its first pages, as many as were asked for (radix/hashes.py)
        self.pins = 0
        self.hits = 0
        self.last_used = 0.0  # seconds
        self.program: object = None  # who uses it: one program, or SHARED
        self.back_at: float | None = None  # when that program is expected back, if it said so
        self.retain_until, self.retain_level = 0.0, 0
        self.awaited, self.await_until = 0, 0.0  # requests expected to continue from here, and for how long
        self.appender: Lease | None = None  # the one request that writes on in this tail leaf
        self.entry: tuple[Any, ...] | None = None  # this node's live entry in the eviction heap
        self.root: Root = parent.root if parent is not None else self  # type: ignore[assignment]

    @property
    def n_tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @property
    def n_pages(self) -> int:
        return len(self.pages)

    @property
    def evictable(self) -> bool:
        """An unpinned leaf that holds pages: what eviction may trim."""
        return not self.pins and not self.children and len(self.pages) > 0

    def __repr__(self) -> str:
        return f"Node({self.n_tokens} tokens, {self.n_pages} pages, {len(self.children)} children, {self.pins} pins)"


class Root(Node):
    """The empty node at the top of one namespace."""

    __slots__ = ("n_pages_below", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", NO_PAGES)
        self.namespace = namespace
        self.n_pages_below = 0


class Spot(NamedTuple):
    """Where a walk ended: `n_edge` whole pages into `node`'s edge, `n_bytes` of the key matched by whole pages.

    `source` holds the page whose first `r` tokens match on, `page` (None and r == 0 when nothing does).
    """

    node: Node
    n_edge: int
    n_bytes: int
    source: Node | None = None
    page: int = -1
    r: int = 0


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix, in tokens."""
    m = min(len(a), len(b)) // TOKEN_BYTES
    if m <= 64:  # big integers find the first difference of a page faster than an array does
        cut = m * TOKEN_BYTES
        x = int.from_bytes(a[:cut], "little") ^ int.from_bytes(b[:cut], "little")
        return m if not x else ((x & -x).bit_length() - 1) // (8 * TOKEN_BYTES)
    differs = np.frombuffer(a, np.int32, m) != np.frombuffer(b, np.int32, m)
    first = int(differs.argmax())
    return first if differs[first] else m


class RadixTree:
    """Nodes of every namespace, and the counts of pages they hold and pin. Knows nothing of eviction or owners."""

    __slots__ = ("n_hit", "n_nodes", "n_pages", "n_pinned", "page_bytes", "page_size", "roots")

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.roots: dict[Namespace, Root] = {}
        self.n_nodes = 0  # roots not counted
        self.n_pages = 0
        self.n_pinned = 0  # pages in pinned nodes
        self.n_hit = 0  # pages in nodes that were hit since they were cached

    # -- looking: never writes ---------------------------------------------------------------------------------

    def locate(self, node: Node, data: bytes) -> Spot:
        """Follow `data` (token bytes) down from the end of `node`, as far as whole pages and then tokens match."""
        page_bytes, end, pos = self.page_bytes, len(data), 0
        while pos + page_bytes <= end:
            child = node.children.get(data[pos : pos + page_bytes])
            if child is None:
                break
            if not data.startswith(child.data, pos):
                return self._inside(child, data, pos)
            node = child
            pos += len(child.data)
        source, r = self._best_child(node, data[pos : pos + page_bytes])
        page = int(source.pages[0]) if source is not None else -1
        return Spot(node, node.n_pages, pos, source, page, r)

    def _inside(self, node: Node, data: bytes, pos: int) -> Spot:
        """The walk ends inside `node`'s edge, at least one page in."""
        n = common_tokens(node.data, data[pos : pos + len(node.data)])
        k, r = divmod(n, self.page_size)
        n_bytes = pos + k * self.page_bytes
        if r == 0:
            return Spot(node, k, n_bytes)
        return Spot(node, k, n_bytes, node, int(node.pages[k]), r)

    def _best_child(self, node: Node, rest: bytes) -> tuple[Node | None, int]:
        """The child that shares most tokens with `rest` (at most a page), and how many; a tail leaf if one does."""
        order = node.order
        if not order or not rest:
            return None, 0
        i = bisect_left(order, rest)
        best, key = 0, b""
        for near in order[max(i - 1, 0) : i + 1]:
            r = common_tokens(near, rest)
            if r > best:
                best, key = r, near
        if best == 0:
            return None, 0
        exact = node.children.get(rest[: best * TOKEN_BYTES])  # a tail leaf that ends right here
        return (exact or node.children[key]), best

    def n_loose(self, spot: Spot) -> int:
        """Of the whole pages from the root to the spot, those that nobody pins."""
        n = 0 if spot.node.pins else spot.n_edge - spot.node.n_pages
        for node in self.chain(spot.node):
            if node.pins:  # and with it all above
                break
            n += node.n_pages
        return n

    def covers(self, node: Node, rest: bytes) -> bool:
        """True if some child of `node` begins with all of `rest` (less than a page of tokens)."""
        i = bisect_left(node.order, rest)
        return i < len(node.order) and node.order[i].startswith(rest)

    def redundant(self, leaf: Node) -> bool:
        """True if a sibling holds all that this tail leaf holds, and more."""
        assert leaf.parent is not None
        order = leaf.parent.order
        i = bisect_left(order, leaf.data) + 1
        return i < len(order) and order[i].startswith(leaf.data)

    def shorter_tail(self, node: Node) -> Node | None:
        """The nearest sibling tail leaf whose tokens `node` begins with, if any."""
        assert node.parent is not None
        order = node.parent.order
        i = bisect_left(order, self.key(node))
        if i == 0 or not node.data.startswith(order[i - 1]):
            return None
        return node.parent.children[order[i - 1]]

    def is_tail(self, node: Node) -> bool:
        return 0 < len(node.data) < self.page_bytes

    def key(self, node: Node) -> bytes:
        """What the parent finds the node by: its first page, or all of a tail leaf."""
        return node.data[: self.page_bytes]

    def path(self, node: Node, above: Node | None = None) -> Ids:
        """The pages from below `above` (default: the root) down to the end of `node`."""
        parts = [n.pages for n in self.chain(node, above)]
        return np.concatenate(parts[::-1]) if parts else NO_PAGES.copy()

    def chain(self, node: Node, above: Node | None = None) -> Iterator[Node]:
        """`node` and its ancestors, upward, up to but without `above` (default: the root)."""
        at: Node | None = node
        while at is not None and at is not above and at.parent is not None:
            yield at
            at = at.parent

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first; roots are not yielded."""
        stack: list[Node] = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- editing -----------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Root:
        """The namespace's root, made when missing; it goes again when nothing hangs below it or holds it."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def attach(self, parent: Node, data: bytes, pages: Ids) -> Node:
        """A new, unpinned child. The caller knows that no child with its key exists."""
        node = Node(parent, data, np.array(pages, dtype=np.int32))
        self._link(node)
        self.n_nodes += 1
        self._count(node, node.n_pages)
        return node

    def extend(self, node: Node, data: bytes, pages: Ids) -> None:
        """Lengthen the edge of a childless node that ends at a page border."""
        assert not node.children
        assert len(node.data) % self.page_bytes == 0
        node.data += data
        node.pages = np.concatenate((node.pages, pages))
        self._count(node, len(pages))

    def rewrite(self, leaf: Node, data: bytes) -> None:
        """A tail leaf's page holds more tokens now (up to a full page, which makes it a normal node)."""
        assert self.is_tail(leaf)
        assert len(data) <= self.page_bytes
        assert data.startswith(leaf.data)
        self._unlink(leaf)
        leaf.data = data
        leaf.digests = []
        self._link(leaf)

    def split(self, node: Node, k: int) -> Node:
        """Cut the edge after `k` pages; returns the new upper node.

        `node` stays the lower one, so whoever holds it still holds the whole path; every pin of the lower
        passes through the upper, which therefore starts with as many.
        """
        assert 0 < k < node.n_pages
        assert node.parent is not None
        cut = k * self.page_bytes
        upper = Node(node.parent, node.data[:cut], node.pages[:k])
        upper.pins, upper.hits, upper.last_used = node.pins, node.hits, node.last_used
        upper.program, upper.back_at = node.program, node.back_at
        upper.retain_level, upper.retain_until = node.retain_level, node.retain_until
        upper.digests, node.digests = node.digests[:k], node.digests[k:]
        upper.parent.children[self.key(node)] = upper  # type: ignore[union-attr]  # same key, same place in order
        node.data, node.pages, node.parent = node.data[cut:], node.pages[k:], upper
        self._link(node)
        self.n_nodes += 1
        return upper

    def trim(self, node: Node, k: int) -> Ids:
        """Cut the last `k` pages off a childless node and return them; a node left with none is detached."""
        assert not node.children
        assert 0 < k <= node.n_pages
        keep = node.n_pages - k
        cut = node.pages[keep:]
        del node.digests[keep:]
        self._count(node, -k)
        if keep == 0:
            self._unlink(node)
            self.n_nodes -= 1
            node.pages, node.entry = NO_PAGES, None
            self._drop_if_idle(node.root)
        else:
            node.data = node.data[: keep * self.page_bytes]
            node.pages = node.pages[:keep]
        return cut

    def pin(self, node: Node, above: Node | None, now: float, program: object = None, hit: bool = False) -> None:
        """Hold `node` and all from it up to (without) `above`; None: up to and with the root.

        `program`: who uses these nodes from now on (None: nobody, they are only kept in place). `hit`: because
        a prompt matched them.
        """
        at: Node | None = node
        while at is not None and at is not above:
            if at.pins == 0:
                self.n_pinned += len(at.pages)
            at.pins += 1
            if program is not None:
                self.touch(at, program, now)
            if hit:
                self.n_hit += 0 if at.hits else len(at.pages)
                at.hits += 1
                at.awaited = max(0, at.awaited - 1)
            at = at.parent

    def touch(self, node: Node, program: object, now: float) -> None:
        """`program` uses the node now."""
        node.last_used = now
        if node.program != program:
            node.program = program if node.program is None else SHARED
            node.back_at = None

    def unpin(self, node: Node, above: Node | None) -> None:
        """The reverse of `pin`, with the same bounds."""
        at: Node | None = node
        while at is not None and at is not above:
            assert at.pins > 0
            at.pins -= 1
            if at.pins == 0:
                self.n_pinned -= len(at.pages)
            at = at.parent
        if at is None:
            self._drop_if_idle(node.root)

    def _drop_if_idle(self, root: Root) -> None:
        if not root.children and not root.pins:
            self.roots.pop(root.namespace, None)

    def _count(self, node: Node, delta: int) -> None:
        self.n_pages += delta
        node.root.n_pages_below += delta
        if node.pins:
            self.n_pinned += delta
        if node.hits:
            self.n_hit += delta

    def _link(self, node: Node) -> None:
        assert node.parent is not None
        key = self.key(node)
        assert key not in node.parent.children
        node.parent.children[key] = node
        if self.page_size > 1:
            insort(node.parent.order, key)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        key = self.key(node)
        del node.parent.children[key]
        if self.page_size > 1:
            order = node.parent.order
            del order[bisect_left(order, key)]
