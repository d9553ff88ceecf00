"""Which hints of a request change what this engine does, given its policies."""

from __future__ import annotations

from radix.hints import holds_next
from runtime.messages import Hints
from runtime.scheduler.state import State


def honoured(state: State, hints: Hints) -> tuple[str, ...]:
    """Names of the given hints that scheduling or eviction acts on; the others were read and had no effect."""
    evicts = state.cache.heap.policy.honours
    given = {
        "program_id": hints.program_id is not None and (state.policy.name == "program" or "final" in evicts),
        "parent_id": hints.parent_id is not None and state.policy.name == "program" and state.families.known(hints),
        "expected_fanout": hints.expected_fanout > 0 and "expected_fanout" in evicts,
        "depth": holds_next(hints) and "depth" in evicts,
        "priority": hints.priority != 0 and state.policy.preempts,
        "expect_return_s": hints.expect_return_s is not None and "expect_return_s" in evicts,
        "final": hints.final and "final" in evicts,
        "retain": (hints.retain_ttl_s is not None or hints.retain_priority != 0) and "retain" in evicts,
    }
    return tuple(name for name, acts in given.items() if acts)
