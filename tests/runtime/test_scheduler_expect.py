"""A program that says how many branches will follow keeps what they go on from: newcomers leave them room."""

from __future__ import annotations

import pytest

from runtime.messages import Hints
from runtime.scheduler.expect import HOLD_S
from tests.runtime.world import Clock, World, alone

PROMPT = [2 + i % 50 for i in range(40)]
OTHER = [3 + i % 47 for i in range(60)]
FORKS = Hints(program_id="p", expected_fanout=2)


def world(policy: str = "hints") -> World:
    """24 pages of 4 tokens: room for either prompt, not for both."""
    made = World(n_pages=24, eviction_policy=policy, max_step_tokens=128, chunk_tokens=128)
    made.ask("parent", PROMPT, max_tokens=4, hints=FORKS)
    made.run()
    return made


def is_waiting(w: World, rid: str) -> bool:
    return rid not in w.said and w.scheduler.stats()["waiting"] > 0


def test_a_newcomer_waits_for_the_branches_and_they_reuse_everything() -> None:
    w = world()
    w.ask("newcomer", OTHER, max_tokens=2)
    w.turn(3)
    assert is_waiting(w, "newcomer")
    said = w.said["parent"].tokens
    for i in range(2):
        w.ask(f"branch{i}", [*PROMPT, *said, 7 + i], max_tokens=2)
    w.run()
    for i in range(2):
        usage = w.said[f"branch{i}"].usage
        assert usage is not None
        assert usage.cached_tokens >= len(PROMPT) + len(said) - 1
    assert w.tokens("newcomer") == alone(OTHER, max_tokens=2).tokens


def test_it_does_not_wait_for_branches_that_do_not_come() -> None:
    w = world()
    assert isinstance(w.clock, Clock)
    w.ask("newcomer", OTHER, max_tokens=2)
    w.turn(3)
    assert is_waiting(w, "newcomer")
    w.clock.now += HOLD_S * 1.01
    w.run()
    assert w.tokens("newcomer") == alone(OTHER, max_tokens=2).tokens


def test_it_waits_for_nobody_where_there_is_room() -> None:
    w = world()
    w.ask("newcomer", OTHER[:20], max_tokens=2)
    w.turn(3)
    assert not is_waiting(w, "newcomer")


def test_under_another_policy_nobody_waits() -> None:
    w = world("lru")
    w.ask("newcomer", OTHER, max_tokens=2)
    w.turn(3)
    assert not is_waiting(w, "newcomer")


@pytest.mark.parametrize("fanout", [0, 2])
def test_a_running_request_announces_its_branches(fanout: int) -> None:
    w = World(n_pages=24, eviction_policy="hints", max_step_tokens=128, chunk_tokens=128)
    w.ask("parent", PROMPT, max_tokens=8, hints=Hints(program_id="p", expected_fanout=fanout))
    w.turn(2)
    w.ask("newcomer", OTHER[:40], max_tokens=2)
    w.turn(2)
    assert is_waiting(w, "newcomer") is (fanout > 0)
