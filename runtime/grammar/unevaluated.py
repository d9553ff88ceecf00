"""`unevaluatedProperties: false` and `unevaluatedItems: false` of a node whose siblings are merged.

Only what a schema says of a value that is valid for it counts as evaluation: nothing that comes of a `not`, of a failed
`if` or of a dependency whose key is absent. Each alternative of a union carries its own annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runtime.grammar.nodes import Array, Literal, Never, Node, Object, Ref, Resolve, TooComplex, Union, item_node, union
from runtime.grammar.seen import EVERY_ITEM, EVERY_KEY, UNSEEN


def close_keys(node: Node, resolve: Resolve) -> Node:
    """No keys but evaluated ones. Raises TooComplex."""
    return _each(node, resolve, _close_keys)


def close_items(node: Node, resolve: Resolve) -> Node:
    """No items but evaluated ones. Those that only `contains` evaluates are left out: a subset."""
    return _each(node, resolve, _close_items)


def unseen(node: Node, resolve: Resolve) -> Node:
    """The same values without annotations."""
    return _each(node, resolve, _unseen)


def _each(node: Node, resolve: Resolve, change: Callable[[Node], Node]) -> Node:
    match node:
        case Ref(name):
            return _each(resolve(name), resolve, change)
        case Union(nodes):
            return union(_each(n, resolve, change) for n in nodes)
    return change(node)


def _close_keys(node: Node) -> Node:
    match node:
        case Literal(values):
            kept = tuple(v for v in values if not isinstance(v, dict) or node.seen.every_key(v))
            return Literal(kept, seen=node.seen | EVERY_KEY) if kept else Never()
        case Object() if node.seen.all_keys:
            return node
        case Object():
            if any(p.regex not in node.seen.patterns for p in node.patterns):
                raise TooComplex("patternProperties whose keys are not evaluated")
            props = {key: n if node.seen.key(key) else Never() for key, n in node.props.items()}
            return replace(node, props=props, additional=Never(), open=False, seen=node.seen | EVERY_KEY)
    return node


def _close_items(node: Node) -> Node:
    match node:
        case Literal(values):
            kept = tuple(v for v in values if not isinstance(v, list) or node.seen.length(len(v)))
            return Literal(kept, seen=node.seen | EVERY_ITEM) if kept else Never()
        case Array() if not node.seen.all_items:
            prefix = tuple(item_node(node, i) for i in range(node.seen.items))
            return replace(node, prefix=prefix, items=Never(), seen=node.seen | EVERY_ITEM)
    return node


def _unseen(node: Node) -> Node:
    match node:
        case Literal() | Object() | Array() if node.seen != UNSEEN:
            return replace(node, seen=UNSEEN)
    return node
