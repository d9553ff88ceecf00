"""Siblings that start in one step compute every token they share once, to the token and not only to the page."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.world import World, alone, make_submit

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])


def ids(n: int, start: int = 2) -> list[int]:
    return [2 + (start + 7 * i + i * i // 5) % 60 for i in range(n)]


def together(prompts: list[list[int]], **options: Any) -> World:
    world = World(**{"page_size": 16, "n_pages": 512, "max_running": 16, "max_step_tokens": 512, **options})
    world.ask_together(*(make_submit(f"r{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts)))
    return world.run()


@BOTH
def test_forks_of_a_cold_prompt_compute_it_once_to_the_token(overlap: bool) -> None:
    prompts = [[*ids(53), 3 + i, 4] for i in range(6)]
    world = together(prompts, overlap=overlap)
    assert world.scheduler.stats()["prefilled"] == 53 + 6 * 2
    assert world.scheduler.stats()["copied"] == 5 * (53 % 16)
    for i, prompt in enumerate(prompts):
        assert world.tokens(f"r{i}") == alone(prompt, max_tokens=6).tokens


@BOTH
def test_twins_compute_only_their_last_token_twice(overlap: bool) -> None:
    world = together([ids(53)] * 4, overlap=overlap)
    assert world.scheduler.stats()["prefilled"] == 53 + 3


@BOTH
def test_a_request_that_comes_while_another_decodes_copies_its_partial_page(overlap: bool) -> None:
    world = World(overlap=overlap, page_size=16, n_pages=64)
    world.ask("first", ids(21), max_tokens=40)
    world.turn(4)
    world.ask("second", [*ids(21), 7], max_tokens=4)
    world.run()
    usage = world.said["second"].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.prefilled_tokens) == (21, 1)
    assert world.tokens("first") == alone(ids(21), max_tokens=40).tokens
    assert world.tokens("second") == alone([*ids(21), 7], max_tokens=4).tokens


@BOTH
def test_a_tree_of_thought_costs_what_its_tokens_cost(overlap: bool) -> None:
    """Three children below each of three below a cold trunk, each level's children submitted together."""
    world = World(overlap=overlap, page_size=16, n_pages=512, max_running=16, max_step_tokens=512)
    parents = [ids(101)]
    for depth in range(2):
        prompts = {f"{depth}.{i}.{b}": [*parent, 5 + b, 9] for i, parent in enumerate(parents) for b in range(3)}
        world.ask_together(*(make_submit(rid, prompt, max_tokens=7) for rid, prompt in prompts.items()))
        world.run()
        parents = [[*prompt, *world.tokens(rid), 11] for rid, prompt in prompts.items()]
    first = 101 + 3 * 2
    second = 3 * (2 + 3 * 2)  # below each parent: its last token and the literal once, then three branches
    assert world.scheduler.stats()["prefilled"] == first + second


prompts_of = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=7)


@settings(max_examples=40, deadline=None)
@given(prompts_of, st.sampled_from([2, 4, 16]), st.booleans(), st.sampled_from([(512, 64), (24, 8)]))
def test_siblings_of_any_shape_answer_as_if_alone_and_share_all_they_can(
    shapes: list[tuple[int, int, int]], page_size: int, overlap: bool, budget: tuple[int, int]
) -> None:
    prompts = [[*ids(n, start=40 * (n_own > 8)), *([2 + own] * n_own)] for n, own, n_own in shapes]
    world = together(
        prompts, page_size=page_size, overlap=overlap, max_step_tokens=budget[0], chunk_tokens=budget[1], n_pages=256
    )
    for i, prompt in enumerate(prompts):
        assert world.tokens(f"r{i}") == alone(prompt, max_tokens=6).tokens
    if budget[0] == 512:  # nobody was cut into chunks: what is computed is what is distinct, and each one's last token
        distinct = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
        assert world.scheduler.stats()["prefilled"] <= len(distinct) + len(prompts)


@BOTH
def test_a_copy_that_the_pool_has_no_room_for_is_given_up_wherever_it_is_found(overlap: bool) -> None:
    """The cached branch that a prompt leaves fills the pool, and holding it for a copy would leave no page to go on."""
    world = World(overlap=overlap, page_size=4, n_pages=32, max_running=1, max_step_tokens=8, chunk_tokens=8)
    world.ask("branch", ids(128), max_tokens=0)
    world.run()
    prompt = [*ids(58), *[63] * 40]  # leaves inside a page, with most of the pool below
    world.ask("leaves", prompt, max_tokens=5)
    assert world.run().tokens("leaves") == alone(prompt, max_tokens=5).tokens
    assert world.said["leaves"].finish.message is None  # type: ignore[union-attr]
