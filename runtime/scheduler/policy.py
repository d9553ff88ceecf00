"""In which order requests wait. Values in, values out: a policy never touches the queue, the cache or a clock.

Work is counted in prefilled tokens: `work_at_arrival` is the scheduler's total when the request came. Because
every waiting request ages at the same pace, `hit - age * work_since_arrival` orders them the same way at all
times, and a queue can keep them sorted by a key that never changes (`key`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

AGE = 1.0  # tokens of cached prefix that one token of others' prefill work, done since arrival, outweighs


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a policy may know of a waiting request. `prefix`: bytes of the tokens a probe found cached."""

    num: int  # order of arrival
    n_tokens: int = 0
    hit: int = 0
    work_at_arrival: int = 0
    priority: int = 0
    resumed: bool = False  # was retracted; goes before its equals
    program: str = ""
    client: str = ""
    prefix: bytes = b""


Key = tuple[float, ...]


def key_fcfs(w: Waiting) -> Key:
    """First come, first served."""
    return (not w.resumed, w.num)


def key_lpm(w: Waiting) -> Key:
    """Longest cached prefix first; each token prefilled since arrival counts like a cached one."""
    return (not w.resumed, AGE * w.work_at_arrival - w.hit, w.num)


def key_priority(w: Waiting) -> Key:
    """Larger priority first, then order of arrival."""
    return (-w.priority, not w.resumed, w.num)


def arrange_dfs(window: Sequence[Waiting]) -> list[Waiting]:
    """Depth-first over the tree of cached prefixes, the subtree with most waiting requests first.

    So requests below one node run next to each other while its pages are hot. Resumed ones stay in front.
    """
    front = [w for w in window if w.resumed]
    rest = [w for w in window if not w.resumed]
    return front + _dfs(rest, 0)


def _dfs(group: list[Waiting], depth: int) -> list[Waiting]:
    """`group` shares its first `depth` bytes of prefix: those that end here first, then heavier branches first."""
    here = [w for w in group if len(w.prefix) <= depth]
    branches: dict[bytes, list[Waiting]] = {}
    for w in group:
        if len(w.prefix) > depth:
            branches.setdefault(w.prefix[depth : depth + 4], []).append(w)
    out = here
    for branch in sorted(branches.values(), key=lambda b: (-len(b), b[0].num)):
        out = out + _dfs(branch, _common(branch, depth))
    return out


def _common(branch: list[Waiting], depth: int) -> int:
    """How far all prefixes of `branch` agree, in whole tokens; more than `depth`."""
    low, high = min(w.prefix for w in branch), max(w.prefix for w in branch)
    n = depth + 4
    while n < min(len(low), len(high)) and low[n : n + 4] == high[n : n + 4]:
        n += 4
    return n


@dataclass(frozen=True, slots=True)
class Policy:
    """`bucket` splits the queue (least attained service first), `key` orders a bucket, `arrange` a window of it.

    `catch_up`: a bucket that was idle starts level with the least served one and cannot save up credit.
    `preempts`: a waiting request may take the place of a running one of lower priority.
    `uses_hits`: the key depends on what is cached, so it is refreshed while waiting.
    """

    name: str
    key: Callable[[Waiting], Key]
    bucket: Callable[[Waiting], Hashable] = lambda w: None
    arrange: Callable[[Sequence[Waiting]], list[Waiting]] | None = None
    catch_up: bool = False
    preempts: bool = False
    uses_hits: bool = False
    bucketed: bool = False


def bucket_program(w: Waiting) -> Hashable:
    """Requests of one agent program share one account; a request without a program is its own."""
    return w.program or w.num


def bucket_client(w: Waiting) -> Hashable:
    return w.client


POLICIES = {
    "fcfs": Policy("fcfs", key_fcfs),
    "lpm": Policy("lpm", key_lpm, uses_hits=True),
    "dfs-weight": Policy("dfs-weight", key_lpm, arrange=arrange_dfs, uses_hits=True),
    "priority": Policy("priority", key_priority, preempts=True),
    "program": Policy("program", key_lpm, bucket=bucket_program, uses_hits=True, bucketed=True),
    "fair": Policy("fair", key_lpm, bucket=bucket_client, catch_up=True, uses_hits=True, bucketed=True),
}
