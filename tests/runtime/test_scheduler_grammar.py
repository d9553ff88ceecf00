"""Constrained rows: masks from the true state, forced tokens appended in one go, and the ends they bring."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.messages import GrammarSpec
from runtime.scheduler.retract import retract
from tests.runtime.fake_grammar import END, FakeCursor, FakeGrammars, spec_of
from tests.runtime.world import World, make_segment, make_submit

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
JUMP = pytest.mark.parametrize("jump", [False, True], ids=["stepwise", "jump"])
CHOICES = [[5, 6], [7], [8], [9], [10, 11], [12, 13], [14], [15], [16, 17]]


def world_of(overlap: bool, *, slow: bool = False, jump_forward: bool = True, **options: Any) -> World:
    return World(overlap=overlap, grammar=FakeGrammars(slow=slow), jump_forward=jump_forward, **options)


def follows(tokens: list[int], places: list[list[int]]) -> bool:
    return len(tokens) == len(places) and all(t in place for t, place in zip(tokens, places, strict=True))


@BOTH
@JUMP
def test_every_token_is_allowed_and_the_end_needs_no_stop_token(overlap: bool, jump: bool) -> None:
    world = world_of(overlap, jump_forward=jump)
    for i in range(6):
        world.ask(f"r{i}", range(2, 5 + i), grammar=spec_of(CHOICES), max_tokens=50)
    world.run()
    for i in range(6):
        said = world.said[f"r{i}"]
        assert follows(said.tokens, CHOICES)
        assert said.finish is not None
        assert said.finish.reason == "stop"


@BOTH
def test_jumping_changes_no_token_and_saves_steps(overlap: bool) -> None:
    said, steps = [], []
    for jump in (False, True):
        world = world_of(overlap, jump_forward=jump)
        world.ask("a", range(2, 9), grammar=spec_of(CHOICES), max_tokens=50)
        said.append(world.run().tokens("a"))
        steps.append(world.scheduler.stats()["steps"])
    assert said[0] == said[1]
    assert steps[1] < steps[0]


@BOTH
def test_a_constant_is_computed_with_the_prompt(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("a", range(2, 9), grammar=spec_of([[t] for t in range(5, 25)]), max_tokens=50)
    said = world.run().said["a"]
    assert said.tokens == list(range(5, 25))
    stats = world.scheduler.stats()
    assert stats["steps"] - stats["rows_stale"] <= 1
    assert stats["forced"] == 20
    assert said.usage is not None
    assert said.usage.forced_tokens == said.usage.completion_tokens == 20


@BOTH
def test_forced_tokens_obey_max_tokens(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("a", [2, 3], grammar=spec_of([[t] for t in range(5, 25)]), max_tokens=7)
    said = world.run().said["a"]
    assert said.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert said.finish is not None
    assert said.finish.reason == "length"


@BOTH
def test_a_stop_inside_forced_tokens_ends_there(overlap: bool) -> None:
    world = world_of(overlap)
    places = [[5, 6], *([t] for t in range(7, 15))]
    world.ask("a", [2, 3], grammar=spec_of(places), max_tokens=20, stop_token_ids=(10,))
    said = world.run().said["a"]
    assert said.tokens[1:] == [7, 8, 9, 10]
    assert said.finish is not None
    assert said.finish.matched == 10


@BOTH
@pytest.mark.parametrize("logprobs", [False, True])
def test_forced_tokens_behind_a_stop_are_not_counted(overlap: bool, logprobs: bool) -> None:
    world = world_of(overlap)
    places = [[t] for t in range(5, 25)]
    for name, first in (("start", []), ("later", [[30, 31], [30, 31]])):
        options = {"max_tokens": 50, "stop_token_ids": (10,), "logprobs": logprobs}
        world.ask(name, range(2, 9), grammar=spec_of([*first, *places]), **options)
        said = world.run().said[name]
        assert said.tokens == [*said.tokens[: len(first)], 5, 6, 7, 8, 9, 10]
        assert said.usage is not None
        assert (said.usage.completion_tokens, said.usage.forced_tokens) == (len(first) + 6, 6)


@BOTH
@pytest.mark.parametrize("logprobs", [False, True])
def test_penalties_count_forced_tokens(overlap: bool, logprobs: bool) -> None:
    """5 to 8 are forced, then any of them may follow: penalised ones win less often over a fresh one."""
    places = [[9, 10], [5], [6], [7], [8], [5, 6, 7, 8, 30]]
    said = []
    for jump, penalty in ((True, 2.0), (False, 2.0), (True, 0.0)):
        world = world_of(overlap, jump_forward=jump)
        options = {"max_tokens": 20, "frequency_penalty": penalty, "presence_penalty": penalty, "logprobs": logprobs}
        for i in range(8):
            world.ask(f"r{i}", [2 + i, 3], grammar=spec_of(places), **options)
        world.run()
        said.append([world.tokens(f"r{i}")[-1] for i in range(8)])
    assert said[0] == said[1]
    assert said[0].count(30) > said[2].count(30)


@BOTH
def test_logprobs_of_constrained_tokens_are_all_there(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("a", [2, 3], grammar=spec_of(CHOICES), max_tokens=50, logprobs=True)
    said = world.run().said["a"]
    assert [lp.token for lp in said.logprobs] == said.tokens


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens": 8}, {"stop_token_ids": (14,)}, {"stop_token_ids": (8,)}, {"presence_penalty": 1.5}],
    ids=str,
)
def test_logprobs_of_forced_tokens_come_from_the_forward(overlap: bool, options: dict[str, Any]) -> None:
    """The same tokens, numbers, alternatives and ending as without jumps, in fewer steps."""
    found, steps = [], []
    for jump in (False, True):
        world = world_of(overlap, jump_forward=jump)
        params = {"max_tokens": 50, "logprobs": True, "top_logprobs": 2, **options}
        for i in range(3):
            world.ask(f"r{i}", range(2, 5 + i), grammar=spec_of([[3], [4], *CHOICES]), **params)
        world.run()
        found.append([world.said[f"r{i}"] for i in range(3)])
        steps.append(world.scheduler.stats()["steps"])
    for plain, jumped in zip(*found, strict=True):
        assert jumped.tokens == plain.tokens
        assert [lp.token for lp in jumped.logprobs] == jumped.tokens
        assert jumped.logprobs == plain.logprobs
        assert jumped.finish == plain.finish
        assert jumped.usage is not None
        assert jumped.usage.completion_tokens == len(jumped.tokens)
        assert jumped.usage.forced_tokens >= 2
    assert steps[1] < steps[0]


@BOTH
def test_logprobs_of_forced_tokens_survive_retraction(overlap: bool) -> None:
    places = [[5 + i % 3, 9] if i % 4 else [20] for i in range(40)]
    places[10:14] = [[30], [31], [32], [33]]
    found = []
    for jump, n_pages in ((False, 400), (True, 24)):
        world = world_of(overlap, jump_forward=jump, page_size=4, n_pages=n_pages, max_running=4)
        for i in range(4):
            world.ask(f"r{i}", range(2, 10 + i), grammar=spec_of(places), max_tokens=80, logprobs=True)
        world.run()
        found.append([world.said[f"r{i}"].logprobs for i in range(4)])
    assert world.scheduler.stats()["retractions"] > 0
    assert found[0] == found[1]


@BOTH
@pytest.mark.parametrize("turns", range(2, 14))
def test_retraction_at_any_moment_loses_no_logprob(overlap: bool, turns: int) -> None:
    """Between a forced run, its sample's commit and that of its row; what was computed is matched in the cache."""
    found = []
    for retracted in (False, True):
        world = world_of(overlap, page_size=1, n_pages=256)
        world.ask("a", range(2, 9), grammar=spec_of([[3], [4], *CHOICES * 2]), max_tokens=50, logprobs=True)
        world.turn(turns)
        if retracted and "a" in world.state.live and world.state.live["a"].slot:
            retract(world.state, world.state.live["a"])
        found.append(world.run().said["a"])
    assert found[0].tokens == found[1].tokens
    assert found[0].logprobs == found[1].logprobs
    assert len(found[0].logprobs) == len(found[0].tokens)


@BOTH
def test_prompt_logprobs_and_those_of_a_forced_start_are_told_apart(overlap: bool) -> None:
    found = []
    for jump in (False, True):
        world = world_of(overlap, jump_forward=jump)
        world.ask(
            "a", range(2, 9), grammar=spec_of([[3], [4], *CHOICES]), max_tokens=50, logprobs=True,
            prompt_logprobs_from=0,
        )  # fmt: skip
        said = world.run().said["a"]
        found.append((said.prompt_logprobs, said.logprobs, said.tokens))
    assert found[0] == found[1]
    assert len(found[0][0]) == 7


@BOTH
def test_only_sampling_waits_for_the_compiler(overlap: bool) -> None:
    world = world_of(overlap, slow=True)
    world.ask("a", range(2, 30), grammar=spec_of(CHOICES), max_tokens=50)
    world.ask("plain", [3, 4], max_tokens=5)
    world.turn(12)
    slot = world.state.live["a"].slot
    assert int(world.state.rows.done[slot]) == 27  # all of the prompt but its last token
    assert len(world.tokens("plain")) == 5
    world.scheduler.watchdog.progress(world.clock())
    world.state.grammar.finish()
    assert follows(world.run().tokens("a"), CHOICES)


@BOTH
def test_a_grammar_that_cannot_be_compiled_is_a_400_of_its_request(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("bad", range(2, 9), grammar=GrammarSpec(kind="regex", spec="bad"), max_tokens=5)
    world.ask("good", range(2, 9), max_tokens=5)
    world.run()
    finish = world.said["bad"].finish
    assert finish is not None
    assert (finish.reason, finish.status, finish.param) == ("error", 400, "regex")
    assert world.tokens("bad") == []
    assert len(world.tokens("good")) == 5


@BOTH
def test_a_grammar_that_gives_up_ends_its_request_only(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("dead", [2, 3], grammar=spec_of([[5, 6], [7, 8], [], [9]]), max_tokens=9)
    world.ask("good", [2, 4], max_tokens=9)
    world.run()
    finish = world.said["dead"].finish
    assert finish is not None
    assert (finish.reason, finish.status) == ("error", 500)
    assert len(world.tokens("dead")) == 2
    assert len(world.tokens("good")) == 9


@BOTH
def test_a_backend_that_breaks_ends_its_request_only(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = FakeCursor.accept
    monkeypatch.setattr(FakeCursor, "accept", lambda self, t: 1 / 0 if self._at == 2 else accept(self, t))
    world = world_of(overlap, jump_forward=False)
    world.ask("broken", [2, 3], grammar=spec_of([[5, 6]] * 5), max_tokens=9)
    world.ask("good", [2, 4], max_tokens=9)
    world.run()
    finish = world.said["broken"].finish
    assert finish is not None
    assert (finish.reason, finish.status) == ("error", 500)
    assert len(world.tokens("good")) == 9


@BOTH
@JUMP
def test_retraction_keeps_the_place_in_the_grammar(overlap: bool, jump: bool) -> None:
    places = [[5 + i % 3, 9] if i % 5 else [20] for i in range(60)]
    places[10:14] = [[30], [31], [32], [33]]
    world = world_of(overlap, jump_forward=jump, page_size=4, n_pages=24, max_running=4)
    for i in range(4):
        world.ask(f"r{i}", range(2, 10 + i), grammar=spec_of(places), max_tokens=80)
    world.run()
    assert world.scheduler.stats()["retractions"] > 0
    assert all(follows(world.tokens(f"r{i}"), places) for i in range(4))


@BOTH
@pytest.mark.parametrize("turns", range(1, 9))
def test_abort_with_forced_tokens_pending_leaves_nothing_behind(overlap: bool, turns: int) -> None:
    world = world_of(overlap)
    world.ask("a", range(2, 9), grammar=spec_of(CHOICES * 3), max_tokens=50)
    world.turn(turns)
    world.abort("a")
    world.run()


@BOTH
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("turns", range(1, 13))
def test_abort_keeps_the_forced_tokens_that_were_said(overlap: bool, logprobs: bool, turns: int) -> None:
    """And usage counts them and no others: three choices, then nine forced tokens and a choice, again and again."""
    places = [[8, 9], [8, 9], [8, 9], *[*([t] for t in range(20, 29)), [5, 6, 7]] * 9]
    world = world_of(overlap, max_step_tokens=16, chunk_tokens=16)
    world.ask("a", range(2, 30), grammar=spec_of(places), max_tokens=99, logprobs=logprobs)
    world.turn(turns)
    before = list(world.said["a"].tokens) if "a" in world.said else []
    world.abort("a")
    world.run()
    said = world.said["a"]
    assert said.finish is not None
    assert said.finish.reason == "abort"
    assert said.tokens[: len(before)] == before
    assert follows(said.tokens, places[: len(said.tokens)])
    assert said.usage is not None
    assert said.usage.completion_tokens == len(said.tokens)
    assert said.usage.forced_tokens == sum(t >= 20 for t in said.tokens)
    assert [lp.token for lp in said.logprobs] == (said.tokens if logprobs else [])


@BOTH
def test_abort_while_the_grammar_is_compiled(overlap: bool) -> None:
    world = world_of(overlap, slow=True)
    world.ask("a", range(2, 9), grammar=spec_of(CHOICES), max_tokens=50)
    world.turn(4)
    world.abort("a")
    world.run()
    world.state.grammar.finish()
    world.turn()


@BOTH
def test_min_tokens_and_ignore_eos_yield_to_a_finished_grammar(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("a", [2, 3], grammar=spec_of([[5, 6], [7, 8]], open_end=True), max_tokens=20, min_tokens=10)
    world.ask("b", [2, 3], grammar=spec_of([[5, 6], [7, 8]]), max_tokens=20, min_tokens=10, logit_bias={5: -100.0})
    world.run()
    assert len(world.tokens("a")) == 3
    assert world.tokens("a")[-1] == END
    assert len(world.tokens("b")) == 2
    for rid in "ab":
        finish = world.said[rid].finish
        assert finish is not None
        assert finish.reason == "stop"


@BOTH
def test_free_text_needs_no_mask(overlap: bool) -> None:
    world = world_of(overlap)
    world.ask("a", [2, 3], grammar=spec_of([[-1], [-1], [9, 10]]), max_tokens=20)
    world.ask("plain", [2, 3], max_tokens=2)
    world.run()
    assert world.tokens("a")[:2] == world.tokens("plain")
    assert world.tokens("a")[2] in (9, 10)


@BOTH
def test_a_segment_may_have_a_grammar_of_its_own(overlap: bool) -> None:
    world = world_of(overlap, slow=True)
    segment = make_segment([8], max_tokens=9, grammar=spec_of([[5, 6], [9], [10], [11, 12]]))
    submit = make_submit("a", [2, 3], max_tokens=2)
    world.ask_together(type(submit)(rid="a", tokens=submit.tokens, params=submit.params, segments=(segment,)))
    world.turn(8)
    assert len(world.said["a"].segments[0]) == 2
    world.state.grammar.finish()
    said = world.run().said["a"]
    assert follows(said.segments[1], [[5, 6], [9], [10], [11, 12]])


def test_a_grammar_without_a_service_is_refused() -> None:
    world = World()
    world.ask("a", [2, 3], grammar=spec_of(CHOICES))
    finish = world.run().said["a"].finish
    assert finish is not None
    assert finish.param == spec_of(CHOICES).kind
