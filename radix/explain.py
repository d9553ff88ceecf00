"""Why a prompt is not cached further than it is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from radix.hashes import Digest, follow, pages_of, seed
from radix.tree import TOKEN_BYTES, Namespace, Node, RadixTree, Spot

Reason = Literal["cached", "never seen", "evicted", "other namespace", "diverges"]
MAX_NAMESPACES = 1000  # looked into for the same prompt


@dataclass(frozen=True, slots=True)
class Explanation:
    """The first `matched` tokens are cached; why the rest is not.

    cached: nothing is missing. evicted: the next `n_lost` tokens were cached and made room for others.
    other namespace: `namespace` holds `n_lost` more of them. diverges: at token `matched` the cache goes on with
    `cached_token`, the prompt does not. never seen: nothing continues what is cached.
    """

    matched: int
    reason: Reason
    n_lost: int = 0
    cached_token: int | None = None
    token: int | None = None
    namespace: Namespace | None = None

    def __str__(self) -> str:
        match self.reason:
            case "cached":
                return f"all {self.matched} reusable tokens are cached"
            case "evicted":
                return f"{self.n_lost} tokens from token {self.matched} on were evicted"
            case "other namespace":
                return f"{self.n_lost} tokens from token {self.matched} on are cached only in {self.namespace}"
            case "diverges":
                return f"diverges at token {self.matched}: cached {self.cached_token}, got {self.token}"
            case _:
                return f"never seen from token {self.matched} on"


class Ghosts:
    """The digests of the pages evicted last: at least the last `size`, at most about twice as many.

    Two generations, and the older one is dropped whole: forgetting one by one would cost more than remembering. Both
    have all their memory from the start, so that a process does not grow with what it forgets.
    """

    __slots__ = ("_most", "_new", "_old", "size")

    def __init__(self, size: int) -> None:
        self.size = self._most = size
        self._new, self._old = _Marks(size), _Marks(size)

    def add(self, digests: Iterable[Digest]) -> None:
        for digest in digests:
            self._new.add(digest)
            if self._new.n >= self.size:
                self._new, self._old = _Marks(self._most), self._new

    def clear(self) -> None:
        self._new, self._old = _Marks(self._most), _Marks(self._most)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._new or digest in self._old

    def __len__(self) -> int:
        return self._new.n + self._old.n


class _Marks:
    """A set of up to `most` digests, by their first 64 bits: a table at most half full, and no object for each."""

    __slots__ = ("_mask", "_table", "n")

    def __init__(self, most: int) -> None:
        n_slots = 1 << (2 * max(1, most) - 1).bit_length()
        self._table = array("Q", bytes(8 * n_slots))
        self._mask = n_slots - 1
        self.n = 0

    def add(self, digest: Digest) -> None:
        mark, at = self._find(digest)
        if not self._table[at]:
            self._table[at] = mark
            self.n += 1

    def __contains__(self, digest: Digest) -> bool:
        return self._table[self._find(digest)[1]] != 0

    def _find(self, digest: Digest) -> tuple[int, int]:
        """The digest's mark, and the place where it is or would be."""
        mark = int.from_bytes(digest[:8], "little") or 1  # 0: an empty place
        table, mask = self._table, self._mask
        at = mark & mask
        while table[at] and table[at] != mark:
            at = (at + 1) & mask
        return mark, at


def explain(tree: RadixTree, ghosts: Ghosts, ns: Namespace, data: bytes) -> Explanation:
    """Why the prompt's tokens (bytes, the last one left out) are not all cached. Changes nothing."""
    root = tree.roots.get(ns)
    spot = tree.locate(root, data) if root is not None else None
    matched = _total(spot)
    n_tokens = len(data) // TOKEN_BYTES
    if matched >= n_tokens:
        return Explanation(matched, "cached")
    lost = _evicted(tree, ghosts, ns, data, matched)
    if lost:
        return Explanation(matched, "evicted", lost)
    other, best = _elsewhere(tree, ns, data)
    if other is not None and best > matched:
        return Explanation(matched, "other namespace", best - matched, namespace=other)
    cached = _continuation(tree, spot) if spot is not None and matched else None
    if cached is None:
        return Explanation(matched, "never seen")
    token = int.from_bytes(data[matched * TOKEN_BYTES :][:TOKEN_BYTES], "little", signed=True)
    return Explanation(matched, "diverges", cached_token=cached, token=token)


def _total(spot: Spot | None) -> int:
    return spot.n_bytes // TOKEN_BYTES + spot.r if spot is not None else 0


def _evicted(tree: RadixTree, ghosts: Ghosts, ns: Namespace, data: bytes, matched: int) -> int:
    """Tokens beyond `matched` that were cached once, as far as remembered."""
    whole = len(data) // tree.page_bytes
    chain = [seed(ns), *follow(seed(ns), pages_of(data[: whole * tree.page_bytes], tree.page_bytes))]
    end = known = matched // tree.page_size
    while end < whole and chain[end + 1] in ghosts:
        end += 1
    rest = data[end * tree.page_bytes : (end + 1) * tree.page_bytes]
    for n in range(min(len(rest) // TOKEN_BYTES, tree.page_size - 1), 0, -1):  # a tail leaf of n tokens
        if next(follow(chain[end], [rest[: n * TOKEN_BYTES]])) in ghosts:
            return max(end * tree.page_size + n - matched, 0)
    return max(end * tree.page_size - matched, 0) if end > known else 0


def _elsewhere(tree: RadixTree, ns: Namespace, data: bytes) -> tuple[Namespace | None, int]:
    """The other namespace that holds most of the prompt, and how many tokens."""
    best: tuple[Namespace | None, int] = (None, 0)
    for other, root in list(tree.roots.items())[:MAX_NAMESPACES]:
        total = _total(tree.locate(root, data)) if other != ns else 0
        if total > best[1]:
            best = (other, total)
    return best


def _continuation(tree: RadixTree, spot: Spot) -> int | None:
    """The token with which the cache goes on where the walk ended; None if it ends there too."""
    if spot.n_edge < spot.node.n_pages:
        return _token(spot.node, spot.n_edge * tree.page_size + spot.r)
    if spot.source is not None and spot.r < spot.source.n_tokens:
        return _token(spot.source, spot.r)
    if spot.source is None and spot.node.children:
        return _token(next(iter(spot.node.children.values())), 0)
    return None


def _token(node: Node, i: int) -> int:
    return int.from_bytes(node.data[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES], "little", signed=True)
