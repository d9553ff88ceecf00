"""The `hints` object of a request: what an agent says of its program and of its return."""

from __future__ import annotations

import msgspec

from runtime.messages import Hints


class Retain(msgspec.Struct, kw_only=True):
    """Keep this request's path: for how long, and how much before others."""

    ttl_s: float | None = None
    priority: int = 0


class AgentHints(msgspec.Struct, kw_only=True):
    """All optional and soft; values are checked where the request is submitted."""

    program_id: str | None = None
    parent_id: str | None = None
    priority: int = 0
    expect_return_s: float | None = None
    final: bool = False
    retain: Retain | None = None
    expected_fanout: int = 0
    depth: int = 0


def hints_of(given: AgentHints | None) -> Hints:
    """As the scheduler takes them."""
    if given is None:
        return Hints()
    retain = given.retain or Retain()
    return Hints(
        program_id=given.program_id,
        parent_id=given.parent_id,
        priority=given.priority,
        expect_return_s=given.expect_return_s,
        final=given.final,
        retain_ttl_s=retain.ttl_s,
        retain_priority=retain.priority or (1 if given.retain is not None and retain.ttl_s is None else 0),
        expected_fanout=given.expected_fanout,
        depth=given.depth,
    )
