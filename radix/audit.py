"""The full ownership audit: every page has one owner, every count is what a walk of the tree finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from radix.pages import Ids, Owner
from radix.tree import TOKEN_BYTES, Node

if TYPE_CHECKING:
    from radix.cache import PrefixCache


class AuditError(AssertionError):
    """The cache's books do not balance. The message lists everything found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(f"{len(problems)} problem(s):\n" + "\n".join(f"- {p}" for p in problems))
        self.problems = problems


def audit(cache: PrefixCache, private: Iterable[Ids] | None = None) -> None:
    """Raise AuditError if anything is wrong. O(pages + nodes); writes nothing."""
    problems = [*_links(cache), *_pins(cache), *_counts(cache), *_heap(cache), *_owners(cache, private)]
    if problems:
        raise AuditError(problems)


def _links(cache: PrefixCache) -> Iterable[str]:
    """Shape of every node: aligned edges, right keys, sorted order, tails that are leaves."""
    tree = cache.tree
    for ns, root in tree.roots.items():
        if root.namespace != ns or root.parent is not None or root.pages.size or root.data:
            yield f"root {ns} is malformed"
        if not root.children and not root.pins:
            yield f"root {ns} holds nothing and is held by nobody"
    for parent in [*tree.roots.values(), *tree.nodes()]:
        keys = sorted(parent.children) if tree.page_size > 1 else []
        if keys != parent.order:
            yield f"{parent!r}: order is not its children's sorted keys"
        for key, node in parent.children.items():
            yield from _shape(cache, parent, key, node)


def _shape(cache: PrefixCache, parent: Node, key: bytes, node: Node) -> Iterable[str]:
    tree = cache.tree
    if node.parent is not parent or node.root is not parent.root:
        yield f"{node!r} does not point at its parent or root"
    if tree.key(node) != key:
        yield f"{node!r} hangs under a wrong key"
    if not node.data or len(node.data) % TOKEN_BYTES:
        yield f"{node!r} has an edge of {len(node.data)} bytes"
    if tree.is_tail(node):
        if node.n_pages != 1 or node.children:
            yield f"tail leaf {node!r} must be one page without children"
    elif len(node.data) != node.n_pages * tree.page_bytes:
        yield f"{node!r} holds {node.n_tokens} tokens in {node.n_pages} pages of {tree.page_size}"
    if len(node.digests) > node.n_pages:
        yield f"{node!r} has {len(node.digests)} digests"
    if node.appender is not None and (node.appender.leaf is not node or not tree.is_tail(node)):
        yield f"{node!r} has an appender that does not hold it"


def _pins(cache: PrefixCache) -> Iterable[str]:
    """Each node's pins equal the leases and tail sources at or below it; leases end where they say."""
    tree = cache.tree
    expected: Counter[int] = Counter()
    for anchor in [*(lease.anchor for lease in cache.leases), *cache.sources]:
        at: Node | None = anchor
        while at is not None:
            expected[id(at)] += 1
            at = at.parent
        if tree.roots.get(anchor.root.namespace) is not anchor.root:
            yield f"{anchor!r} is held but not in the tree"
    for node in [*tree.roots.values(), *tree.nodes()]:
        if node.pins != expected[id(node)]:
            yield f"{node!r} should have {expected[id(node)]} pins"
    for lease in cache.leases:
        length = sum(n.n_tokens for n in tree.chain(lease.node))
        if lease.released or length != lease.n_tokens:
            yield f"{lease!r} ends at a node that covers {length} tokens"
        if lease.leaf is not None and (lease.leaf.parent is not lease.node or lease.leaf.appender is not lease):
            yield f"{lease!r} adopted a leaf that is not its own"


def _counts(cache: PrefixCache) -> Iterable[str]:
    tree, nodes = cache.tree, list(cache.tree.nodes())
    found = {
        "n_nodes": len(nodes),
        "n_pages": sum(n.n_pages for n in nodes),
        "n_pinned": sum(n.n_pages for n in nodes if n.pins),
        "n_hit": sum(n.n_pages for n in nodes if n.hits),
    }
    for name, value in found.items():
        if getattr(tree, name) != value:
            yield f"tree.{name} is {getattr(tree, name)}, the nodes say {value}"
    below: Counter[int] = Counter()
    for n in nodes:
        below[id(n.root)] += n.n_pages
    for ns, root in tree.roots.items():
        if root.n_pages_below != below[id(root)]:
            yield f"root {ns} counts {root.n_pages_below} pages, its nodes hold {below[id(root)]}"


def _heap(cache: PrefixCache) -> Iterable[str]:
    """Eviction can reach every unpinned leaf, no later than its score says."""
    heap = cache.heap
    covered = dict(heap.covered())
    for node in cache.tree.nodes():
        if not node.evictable:
            continue
        if node not in covered:
            yield f"{node!r} is evictable but not in the heap"
        elif (score := covered[node]) is not None and score > heap.policy.score(node, heap.now):
            yield f"{node!r} is in the heap with a score above its own"


def _owners(cache: PrefixCache, private: Iterable[Ids] | None) -> Iterable[str]:
    """Every page in exactly one place, and marked as such."""
    pool = cache.pool
    owner, free, quarantined = pool.snapshot()
    tree = [n.pages for n in cache.tree.nodes()]
    places = {Owner.FREE: free, Owner.IO: quarantined, Owner.TREE: np.concatenate(tree) if tree else free[:0]}
    if private is not None:
        held = list(private)
        places[Owner.REQUEST] = np.concatenate(held) if held else free[:0]
    seen = np.zeros(pool.n_pages, np.int64)
    for who, pages in places.items():
        np.add.at(seen, pages, 1)
        wrong = pages[owner[pages] != who]
        if wrong.size:
            yield f"pages {_some(wrong)} are with {who.name} but marked otherwise"
        if pool.count(who) != len(pages):
            yield f"{who.name} counts {pool.count(who)} pages and has {len(pages)}"
    if (seen > 1).any():
        yield f"pages {_some(np.flatnonzero(seen > 1))} have two owners"
    lost = (seen == 0) if private is not None else (seen == 0) & (owner != Owner.REQUEST)
    if lost.any():
        yield f"pages {_some(np.flatnonzero(lost))} have no owner"
    if sum(pool.count(who) for who in Owner) != pool.n_pages:
        yield "the owners' counts do not add up to the pool"


def _some(pages: np.ndarray) -> str:
    return f"{pages[:8].tolist()}{'...' if len(pages) > 8 else ''}"
