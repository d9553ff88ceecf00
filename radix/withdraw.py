"""What a failed step leaves: pages published when it was planned, and never written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from radix.tree import Node, RadixTree


def first_late(node: Node, page_step: npt.NDArray[np.int64], step: int) -> int:
    """Index of the node's first page that `step` or a later one writes; its number of pages if none."""
    late = page_step[node.pages] >= step
    return int(late.argmax()) if late.any() else node.n_pages


def doomed(tree: RadixTree, page_step: npt.NDArray[np.int64], step: int) -> list[tuple[Node, int]]:
    """(node, pages to cut off its end), children before parents: all pages that `step` or a later one writes, and
    everything below them. Walks the whole tree, which a failure may cost.
    """
    out: list[tuple[Node, int]] = []
    for root in tree.roots.values():
        for child in root.children.values():
            out.extend(_below(child, page_step, step, cut=False))
    return out[::-1]


def _below(top: Node, page_step: npt.NDArray[np.int64], step: int, *, cut: bool) -> Iterator[tuple[Node, int]]:
    """Parents before children."""
    stack = [(top, cut)]
    while stack:
        node, cut = stack.pop()
        keep = 0 if cut else first_late(node, page_step, step)
        if keep < node.n_pages:
            yield node, node.n_pages - keep
        stack.extend((child, keep < node.n_pages) for child in node.children.values())
