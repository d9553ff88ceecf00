"""Names for page contents: a sha256 chained over the parent's digest and the page's tokens.

A page's digest says what the whole prefix up to its end is, in which namespace. It does not depend on where
nodes begin, and is the same after a flush or a restart. Digests are computed when first asked for and kept on
the node, so a page is hashed once in its life, and not at all when nobody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256

from radix.tree import Namespace, Node, RadixTree

Digest = bytes


def seed(namespace: Namespace) -> Digest:
    """Where a namespace's chain starts."""
    return b"" if namespace == Namespace() else sha256(repr(tuple(namespace)).encode()).digest()


def follow(digest: Digest, pages: Iterable[bytes]) -> Iterator[Digest]:
    """The digests of `pages` (each one page's token bytes), continuing the chain from `digest`."""
    for page in pages:
        digest = sha256(digest + page).digest()
        yield digest


def pages_of(data: bytes, page_bytes: int) -> Iterator[bytes]:
    """Token bytes cut into pages; a shorter last one counts."""
    return (data[i : i + page_bytes] for i in range(0, len(data), page_bytes))


def short(digest: Digest) -> int:
    """The first 64 bits, as the signed integer that events carry."""
    return int.from_bytes(digest[:8], "big", signed=True)


def digests(tree: RadixTree, node: Node) -> list[Digest]:
    """The digest of each page of `node`; hashes what is not known yet, here and above."""
    unknown = []
    at: Node = node
    while at.parent is not None and len(at.digests) < at.n_pages:
        unknown.append(at)
        at = at.parent
    for each in reversed(unknown):
        known = each.digests
        above = known or each.parent.digests  # type: ignore[union-attr]  # only a root has no parent
        start = above[-1] if above else seed(each.root.namespace)
        rest = each.data[len(known) * tree.page_bytes :]
        known.extend(follow(start, pages_of(rest, tree.page_bytes)))
    return node.digests
