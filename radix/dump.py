"""A bounded picture of the tree, as plain JSON-able values, for dashboards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from radix.evict import label
from radix.tree import Node, RadixTree, Root

END_TOKENS = 8  # shown of each end of an edge


def dump(
    tree: RadixTree, now: float, max_nodes: int, users: Mapping[Node, Sequence[str]] = MappingProxyType({})
) -> dict[str, Any]:
    """At most `max_nodes` nodes, breadth first and the most hit children first, so that what is cut is deep or cold.

    {page_size, n_nodes, shown, nodes: [{id, parent, ...}]}; a parent comes before its children, roots have no
    parent and carry their namespace.
    """
    nodes: list[dict[str, Any]] = []
    queue: deque[tuple[Node, int | None]] = deque((root, None) for root in tree.roots.values())
    while queue and len(nodes) < max_nodes:
        node, parent = queue.popleft()
        number = len(nodes)
        one = {"id": number, "parent": parent, **_root(node, now), **_describe(tree, node, now)}
        nodes.append({**one, "users": list(users[node])} if node in users else one)
        children = sorted(node.children.values(), key=lambda child: -child.hits)
        queue.extend((child, number) for child in children[: max_nodes - number])
    return {"page_size": tree.page_size, "n_nodes": tree.n_nodes, "shown": len(nodes), "nodes": nodes}


def _root(node: Node, now: float) -> dict[str, Any]:
    return {"namespace": node.namespace._asdict()} if isinstance(node, Root) else {}


def _describe(tree: RadixTree, node: Node, now: float) -> dict[str, Any]:
    tokens = np.frombuffer(node.data, np.int32)
    due = node.back_at
    return {
        "n_tokens": len(tokens),
        "n_pages": node.n_pages,
        "n_children": len(node.children),
        "tail": tree.is_tail(node),
        "appending": node.appender is not None,
        "hits": node.hits,
        "pins": node.pins,
        "age_s": max(now - node.last_used, 0.0) if node.parent is not None else 0.0,
        "class": label(node, now),
        "back_in_s": None if due is None or math.isinf(due) else due - now,
        "first": tokens[:END_TOKENS].tolist(),
        "last": tokens[-END_TOKENS:].tolist(),
    }
