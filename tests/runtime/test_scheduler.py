"""What the scheduler does with requests: reuse, stops, limits, segments, scores. A fake device checks every page."""

from __future__ import annotations

import pytest

from runtime.execute.fake import FakeRunner, ScriptedRunner, fake_spec
from tests.runtime.world import Said, World, alone, make_submit

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])


def scripted(*tokens: int, **kwargs: object) -> ScriptedRunner:
    """A device that says `tokens`, then EOS (1)."""
    return ScriptedRunner(fake_spec(), default=tokens, **kwargs)  # type: ignore[arg-type]


@BOTH
def test_a_request_says_its_tokens_and_ends_by_length(overlap: bool) -> None:
    world = World(overlap=overlap)
    world.ask("a", [5, 6, 7], max_tokens=4)
    said = world.run().said["a"]
    assert len(said.tokens) == 4
    assert said.finish is not None
    assert said.finish.reason == "length"
    assert said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.prefilled_tokens) == (3, 4, 3)


def test_overlap_changes_nothing_that_is_said() -> None:
    prompts = {f"r{i}": [i + 2] * (3 * i + 1) for i in range(8)}
    said = []
    for overlap in (False, True):
        world = World(overlap=overlap)
        for rid, prompt in prompts.items():
            world.ask(rid, prompt, max_tokens=12, ignore_eos=False)
        said.append({rid: world.run().said[rid].tokens for rid in prompts})
    assert said[0] == said[1]
    assert said[0] == {rid: alone(prompt, max_tokens=12, ignore_eos=False).tokens for rid, prompt in prompts.items()}


@BOTH
def test_the_second_turn_computes_only_what_is_new(overlap: bool) -> None:
    world = World(overlap=overlap)
    first = list(range(2, 12))
    world.ask("one", first, max_tokens=6)
    world.run()
    second = first + world.tokens("one") + [9, 9, 9]
    world.ask("two", second, max_tokens=3)
    usage = world.run().said["two"].usage
    assert usage is not None
    # all but the last token of turn one was computed; it and the three new ones are left
    assert (usage.cached_tokens, usage.prefilled_tokens) == (15, 4)
    assert usage.copied_tokens == 0  # the tail was adopted in place


@BOTH
def test_forks_of_a_cold_prompt_compute_it_once(overlap: bool) -> None:
    world = World(overlap=overlap, n_pages=256, max_running=16)
    shared = [2 + i % 60 for i in range(102)]
    world.ask_together(*(make_submit(f"f{i}", [*shared, 3 + i, 5], max_tokens=3) for i in range(8)))
    world.run()
    stats = world.scheduler.stats()
    assert stats["prefilled"] == 102 + 8 * 2
    for i in range(8):
        assert world.tokens(f"f{i}") == alone([*shared, 3 + i, 5], max_tokens=3).tokens


@BOTH
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tails_of_any_length_are_copied_or_adopted(overlap: bool, page_size: int) -> None:
    """Warm equals cold for every length around a page border."""
    base = [2 + i % 50 for i in range(3 * page_size + 2)]
    for n in sorted({1, page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1} - {0}):
        world = World(overlap=overlap, page_size=page_size, n_pages=512 // page_size)
        world.ask("warm", base, max_tokens=0)
        world.run()
        prompt = [*base[:n], 60, 61]
        world.ask("a", prompt, max_tokens=5)
        world.ask("b", prompt, max_tokens=5)
        world.run()
        cold = alone(prompt, max_tokens=5, world={"page_size": page_size, "n_pages": 512 // page_size}).tokens
        assert world.tokens("a") == world.tokens("b") == cold, n
        usage = world.said["a"].usage
        assert usage is not None
        assert usage.cached_tokens == n


# -- ends ------------------------------------------------------------------------------------------------------


@BOTH
def test_eos_ends_a_request_and_is_its_last_token(overlap: bool) -> None:
    world = World(overlap=overlap, runner=scripted(7, 8))
    world.ask("a", [5, 6], max_tokens=10, ignore_eos=False)
    said = world.run().said["a"]
    assert said.tokens == [7, 8, 1]
    assert said.finish is not None
    assert (said.finish.reason, said.finish.matched) == ("stop", None)


@BOTH
def test_ignore_eos_goes_on(overlap: bool) -> None:
    world = World(overlap=overlap, runner=scripted(7, 1, 8, 9))
    world.ask("a", [5], max_tokens=4)
    assert world.run().tokens("a") == [7, 1, 8, 9]


@BOTH
def test_a_stop_id_is_named_in_the_finish(overlap: bool) -> None:
    world = World(overlap=overlap, runner=scripted(7, 8, 9))
    world.ask("a", [5], max_tokens=9, stop_token_ids=(8,))
    said = world.run().said["a"]
    assert said.tokens == [7, 8]
    assert said.finish is not None
    assert said.finish.matched == 8


@BOTH
def test_a_stop_string_may_span_tokens(overlap: bool) -> None:
    names = [b"?"] * 64
    names[10], names[11], names[12], names[13] = b"hi", b"\nUs", b"er", b":"
    world = World(overlap=overlap, runner=scripted(10, 11, 12, 13, 10), token_bytes=names)
    world.ask("a", [5], max_tokens=9, stop=("\nUser:",))
    said = world.run().said["a"]
    assert said.tokens == [10, 11, 12, 13]
    assert said.finish is not None
    assert said.finish.matched == "\nUser:"


def test_special_tokens_take_part_in_stops_only_where_they_are_seen() -> None:
    names = [b"?"] * 64
    names[10], names[20] = b"a", b"<b>"
    for skip, reason in ((True, "length"), (False, "stop")):
        world = World(runner=scripted(10, 20, 10), token_bytes=names, special_ids=frozenset({20}))
        world.ask("a", [5], max_tokens=3, stop=("<b>",), skip_special_tokens=skip)
        finish = world.run().said["a"].finish
        assert finish is not None
        assert finish.reason == reason


@BOTH
def test_min_tokens_bans_the_end_until_then(overlap: bool) -> None:
    world = World(overlap=overlap, runner=scripted(1, 1, 1, 1, 1))
    world.ask("a", [5], max_tokens=9, min_tokens=3, ignore_eos=False)
    said = world.run().said["a"]
    assert len(said.tokens) == 4
    assert 1 not in said.tokens[:3]
    assert said.tokens[3] == 1


@BOTH
def test_no_tokens_wanted_fills_the_cache_and_ends(overlap: bool) -> None:
    world = World(overlap=overlap)
    world.ask("a", range(2, 20), max_tokens=0)
    said = world.run().said["a"]
    assert said.tokens == []
    assert said.finish is not None
    assert said.finish.reason == "length"
    world.ask("b", range(2, 20), max_tokens=1)
    usage = world.run().said["b"].usage
    assert usage is not None
    assert usage.cached_tokens == 17


@BOTH
@pytest.mark.parametrize(("n_prompt", "max_tokens", "said"), [(30, None, 2), (31, 10_000, 1), (31, 1, 1), (32, 0, 0)])
def test_the_context_bounds_the_answer(overlap: bool, n_prompt: int, max_tokens: int | None, said: int) -> None:
    world = World(overlap=overlap, context_length=32)
    world.ask("a", range(2, 2 + n_prompt), max_tokens=max_tokens)
    got = world.run().said["a"]
    assert len(got.tokens) == said
    assert got.finish is not None
    assert got.finish.reason == "length"


# -- scores and logprobs -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("reading", [True, False])
def test_a_prompt_is_held_back_only_for_somebody_who_reads_along(overlap: bool, reading: bool) -> None:
    world = World(overlap=overlap, n_pages=256, max_step_tokens=256, chunk_tokens=256)
    world.ask("first", [5, 6], max_tokens=40, stream=reading)
    world.turn(4)
    world.ask("long", [2 + i % 40 for i in range(200)], max_tokens=2)
    world.run()
    assert (max(plan.n_tokens for plan in world.runner.plans) > 200) is not reading


@BOTH
def test_logprobs_come_with_each_token(overlap: bool) -> None:
    said = alone([5, 6], overlap=overlap, max_tokens=3, logprobs=True, top_logprobs=2)
    assert [lp.token for lp in said.logprobs] == said.tokens
    assert all(len(lp.top_ids) == 2 and lp.top_ids[0] == lp.token for lp in said.logprobs)
    assert all(lp.logprob is not None and lp.logprob < 0 for lp in said.logprobs)


@BOTH
@pytest.mark.parametrize("start", [0, 1, 7, 19])
def test_prompt_logprobs_are_the_same_cold_and_warm(overlap: bool, start: int) -> None:
    prompt = [2 + i % 40 for i in range(20)]
    world = World(overlap=overlap, chunk_tokens=6)
    runs: list[Said] = []
    for rid in ("cold", "warm"):
        world.ask(rid, prompt, max_tokens=1, logprobs=True, prompt_logprobs_from=start)
        runs.append(world.run().said[rid])
    assert runs[0].prompt_logprobs == runs[1].prompt_logprobs
    assert [lp.token for lp in runs[0].prompt_logprobs] == prompt[start:]
    assert [lp.logprob is None for lp in runs[0].prompt_logprobs] == [start + i == 0 for i in range(20 - start)]
    usage = runs[1].usage
    assert usage is not None
    assert usage.cached_tokens == max(0, start - 1)


def test_prompt_logprobs_without_an_answer() -> None:
    said = alone(range(2, 12), max_tokens=0, prompt_logprobs_from=5)
    assert [lp.token for lp in said.prompt_logprobs] == [7, 8, 9, 10, 11]
    assert said.tokens == []


@BOTH
@pytest.mark.parametrize("chunk", [6, 64])
def test_any_token_can_be_scored_after_any_part_of_a_prompt(overlap: bool, chunk: int) -> None:
    """What comes is what the longer prompt would give, and only what those places ask for is computed again."""
    prompt = [2 + i % 40 for i in range(20)]
    pairs = [(7, prompt[7]), (7, 60), (13, prompt[13]), (20, 61), (20, 62)]
    world = World(overlap=overlap, chunk_tokens=chunk)
    runs: list[Said] = []
    for rid in ("cold", "warm"):
        world.ask(rid, prompt, max_tokens=0, scores=tuple(pairs))
        runs.append(world.run().said[rid])
    assert runs[0].prompt_logprobs == runs[1].prompt_logprobs
    assert [lp.token for lp in runs[0].prompt_logprobs] == [token for _, token in pairs]
    assert runs[0].prompt_logprobs == [
        alone([*prompt[:n], token], max_tokens=0, prompt_logprobs_from=n).prompt_logprobs[0] for n, token in pairs
    ]
    assert [said.tokens for said in runs] == [[], []]
    usage = runs[1].usage
    assert usage is not None
    assert usage.cached_tokens == 6


# -- segments ----------------------------------------------------------------------------------------------------


@BOTH
def test_segments_go_on_in_the_same_request(overlap: bool) -> None:
    world = World(overlap=overlap)
    world.ask("chain", [5, 6, 7], max_tokens=3, segments=[([8, 9], {"max_tokens": 2}), ([4], {"max_tokens": 2})])
    said = world.run().said["chain"]
    assert [len(s) for s in said.segments] == [3, 2, 2]
    assert [f.reason for f in said.finishes] == ["length"] * 3
    # the same as asking one by one, everything before cached
    context = [5, 6, 7, *said.segments[0], 8, 9]
    assert said.segments[1] == alone(context, max_tokens=2).tokens
    context += [*said.segments[1], 4]
    assert said.segments[2] == alone(context, max_tokens=2).tokens
    assert said.usage is not None
    assert said.usage.completion_tokens == 7


@BOTH
def test_an_end_token_is_dropped_before_the_next_segment(overlap: bool) -> None:
    world = World(overlap=overlap, runner=scripted(7, 8))
    world.ask("chain", [5, 6], max_tokens=9, ignore_eos=False, segments=[([9], {"max_tokens": 1})])
    said = world.run().said["chain"]
    assert said.segments[0] == [7, 8, 1]
    runner = world.runner
    assert isinstance(runner, FakeRunner)
    fed = [t for plan in runner.plans for t in plan.token_ids.tolist()]
    assert fed[-1] == 9
    last = runner.plans[-1]
    assert last.kv_lens.tolist() == [5]  # 5 6 7 8 9: the EOS is gone


@BOTH
def test_a_stop_string_at_a_token_border_is_cut_from_the_context(overlap: bool) -> None:
    names = [b"?"] * 64
    names[10], names[11], names[12] = b"x", b"a", b"b"
    world = World(overlap=overlap, runner=scripted(10, 11, 12), token_bytes=names)
    world.ask("chain", [5], max_tokens=9, stop=("ab",), segments=[([9, 9], {"max_tokens": 1})])
    said = world.run().said["chain"]
    assert said.segments[0] == [10, 11, 12]
    assert said.finishes[0].matched == "ab"
    assert isinstance(world.runner, FakeRunner)
    assert world.runner.plans[-1].kv_lens.tolist() == [4]  # 5 10 9 9


@BOTH
def test_a_stop_inside_a_token_ends_the_chain(overlap: bool) -> None:
    names = [b"?"] * 64
    names[10] = b"xa"
    names[11] = b"b"
    world = World(overlap=overlap, runner=scripted(10, 11), token_bytes=names)
    world.ask("chain", [5], max_tokens=9, stop=("ab",), segments=[([9], {"max_tokens": 1})])
    said = world.run().said["chain"]
    assert len(said.finishes) == 1
    assert said.usage is not None


@BOTH
def test_a_literal_that_does_not_fit_the_context_is_an_error_as_a_prompt_of_that_length_is(overlap: bool) -> None:
    world = World(overlap=overlap, context_length=16)
    world.ask("chain", range(2, 12), max_tokens=2, segments=[(range(2, 6), {"max_tokens": 2})])
    said = world.run().said["chain"]
    assert said.segments[0] == alone(range(2, 12), max_tokens=2).tokens
    assert [f.reason for f in said.finishes] == ["length", "error"]
    last = said.finishes[-1]
    assert (last.status, last.param) == (400, "segments")
    assert "maximum context length is 16 tokens. However, your prompt has 16 tokens" in (last.message or "")


# -- leaving early -------------------------------------------------------------------------------------------------


@BOTH
def test_abort_says_so_and_leaves_what_was_computed(overlap: bool) -> None:
    world = World(overlap=overlap)
    world.ask("a", range(2, 22), max_tokens=100)
    world.turn(10)
    world.abort("a")
    said = world.run().said["a"]
    assert said.finish is not None
    assert said.finish.reason == "abort"
    world.ask("b", range(2, 22), max_tokens=1)
    usage = world.run().said["b"].usage
    assert usage is not None
    assert usage.cached_tokens == 19


@BOTH
def test_abort_hits_exactly_whom_it_names(overlap: bool) -> None:
    world = World(overlap=overlap)
    world.ask("a", [5], max_tokens=20, group="g")
    world.ask("aa", [6], max_tokens=20, group="g2")
    world.ask("b", [7], max_tokens=20, group="g")
    world.turn(3)
    world.abort(group="g")
    world.abort("nobody")
    world.run()
    reasons = {rid: said.finish.reason for rid, said in world.said.items() if said.finish}
    assert reasons == {"a": "abort", "b": "abort", "aa": "length"}


@BOTH
def test_abort_of_everything_spares_other_frontends(overlap: bool) -> None:
    world, other = World(overlap=overlap), []
    world.ask("mine", [5], max_tokens=9)
    world.scheduler.receive(make_submit("theirs", [6], max_tokens=9), other.append)
    world.turn(2)
    world.abort(everything=True)
    world.run()
    finish = world.said["mine"].finish
    assert finish is not None
    assert finish.reason == "abort"
    assert other[-1].items[-1].finish.reason == "length"


@BOTH
def test_a_deadline_ends_a_request_wherever_it_is(overlap: bool) -> None:
    world = World(overlap=overlap, max_running=1)
    world.ask("running", [5], max_tokens=100, timeout_s=2.0)
    world.ask("waiting", [6], max_tokens=100, timeout_s=1.0)
    world.turn(3)
    world.clock.now += 3.0  # type: ignore[attr-defined]
    world.run()
    for rid in ("running", "waiting"):
        finish = world.said[rid].finish
        assert finish is not None
        assert (finish.reason, finish.status, finish.param) == ("error", 408, "timeout_s")
    assert world.tokens("running")
    assert world.scheduler.stats()["timed_out"] == 2


def test_requests_that_end_in_time_are_not_kept_until_their_deadline() -> None:
    world = World(n_pages=64, audit=False)
    for i in range(300):
        world.ask(f"r{i}", [5], max_tokens=1, timeout_s=3600.0)
        world.run()
    world.ask("late", [6], max_tokens=100, timeout_s=1.0)
    world.turn(2)
    assert len(world.scheduler._ingest._deadlines) <= 100
    world.clock.now += 3.0  # type: ignore[attr-defined]
    world.run()
    assert world.scheduler.stats()["timed_out"] == 1


# -- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {99: 1.0}}, "logit_bias"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 10**40}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"prompt_logprobs_from": 3}, "prompt_logprobs_from"),
        ({"scores": ((4, 1),)}, "scores"),
    ],
)
def test_bad_values_are_refused_by_name_and_the_loop_goes_on(options: dict[str, object], param: str) -> None:
    world = World()
    world.ask("bad", [5, 6, 7], **{"max_tokens": 1, **options})
    world.ask("good", [5, 6, 7], max_tokens=1)
    world.run()
    finish = world.said["bad"].finish
    assert finish is not None
    assert (finish.reason, finish.status, finish.param) == ("error", 400, param)
    assert len(world.tokens("good")) == 1


@pytest.mark.parametrize("prompt", [[], [64], [-1], list(range(2, 34))])
def test_impossible_prompts_are_refused(prompt: list[int]) -> None:
    world = World(context_length=32)
    world.ask("bad", prompt)
    finish = world.run().said["bad"].finish
    assert finish is not None
    assert (finish.reason, finish.status, finish.param) == ("error", 400, "messages")


def test_a_prompt_that_never_fits_the_pool_is_refused_with_both_numbers() -> None:
    world = World(n_pages=4, page_size=4)
    world.ask("big", [5] * 40)
    finish = world.run().said["big"].finish
    assert finish is not None
    assert finish.message is not None
    assert "16" in finish.message
    assert "40" in finish.message


def test_a_full_queue_answers_429() -> None:
    world = World(max_running=1, max_queue=2)
    for i in range(5):
        world.ask(f"r{i}", [5 + i], max_tokens=3)
    world.run()
    statuses = [said.finish.status for said in world.said.values() if said.finish]
    assert statuses.count(429) == 2  # one runs, two wait
    assert world.scheduler.stats()["queue_full"] == 2
    assert "Try again in" in (world.said["r4"].finish.message or "")  # type: ignore[union-attr]


def test_a_queue_of_none_still_takes_what_can_start_at_once() -> None:
    world = World(max_running=3, max_queue=0)
    world.ask_together(*(make_submit(f"r{i}", [5 + i], max_tokens=3) for i in range(5)))
    world.run()
    assert [len(world.tokens(f"r{i}")) for i in range(5)] == [3, 3, 3, 0, 0]


def test_a_second_request_of_a_live_id_is_refused() -> None:
    world, other = World(), []
    world.ask("a", [5], max_tokens=5)
    world.turn()
    world.scheduler.receive(make_submit("a", [6], max_tokens=5), other.append)
    world.run()
    assert other[0].items[0].finish.param == "rid"
    assert len(world.tokens("a")) == 5


def test_calls_are_answered_even_the_unknown() -> None:
    world = World()
    world.ask("a", range(2, 12), max_tokens=2)
    world.run()
    assert world.call("stats")["finished"] == 1
    assert world.call("audit") == "ok"
    assert world.call("server_info")["page_size"] == 4
    assert world.call("flush")["freed_pages"] == 3
    with pytest.raises(RuntimeError, match="Unknown call"):
        world.call("dance")


def test_pause_holds_back_new_requests_only() -> None:
    world = World()
    world.ask("old", [5], max_tokens=4)
    world.turn()
    world.call("pause")
    world.ask("new", [6], max_tokens=4)
    world.turn(10)
    assert len(world.tokens("old")) == 4
    assert "new" not in world.said
    world.call("resume")
    assert len(world.run().tokens("new")) == 4


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (list(range(2, 22)), None),
        ([*range(2, 12), 50, 51], "diverges at token 10: cached 12, got 50"),
        ([40, 41, 42], "never seen from token 0 on"),
    ],
)
def test_usage_says_why_the_rest_was_not_cached(prompt: list[int], why: str | None) -> None:
    world = World()
    world.ask("first", range(2, 22), max_tokens=1)
    world.run()
    world.ask("second", prompt, max_tokens=1)
    usage = world.run().said["second"].usage
    assert usage is not None
    assert usage.miss == why
