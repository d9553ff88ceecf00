"""Programs on the real scheduler and cache: what is reused, what is equal, what is given back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import ramet as rt
from frontend_lang.errors import DeadlineExceeded, GenerationFailed
from runtime.engine import Engine
from runtime.messages import Submit, pack_ids
from runtime.params import SamplingParams
from tests.lang.engines import toy_engine

RULES = "You answer every question with care and in few words, as the rules of the house demand. "


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with toy_engine(audit=True) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.flush()
    return shared


def idle(engine: Engine) -> None:
    """Nothing runs and nothing is held."""
    for _ in range(200):
        stats = engine.stats()
        if not stats["running"] and not stats["waiting"]:
            break
    assert stats["running"] == stats["waiting"] == stats["cache"]["leases"] == stats["cache"]["request"] == 0
    engine.call("audit")


@rt.function
def tree(s: rt.State, width: int, depth: int) -> None:
    s.system(RULES * 3)
    s.user("Think.")
    s.assistant(rt.gen("root", max_tokens=12))
    _grow(s, width, depth)


def _grow(s: rt.State, width: int, depth: int) -> None:
    if depth == 0:
        return
    for branch in s.fork(width):
        branch.user(f"Go on with {branch.name}.")
        branch.assistant(rt.gen("thought", max_tokens=12))
        _grow(branch, width, depth - 1)


@pytest.mark.parametrize(("width", "depth"), [(8, 1), (2, 4), (3, 3)])
def test_forks_and_trees_reuse_every_reusable_token(engine: Engine, width: int, depth: int) -> None:
    totals = tree.run(engine, width, depth).totals
    assert totals.requests == sum(width**level for level in range(depth + 1))
    assert totals.messages == depth + 1
    assert totals.hit_rate >= 0.99
    assert totals.reused + totals.prefilled == totals.prompt
    idle(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_reuse_is_by_the_token_at_every_page_size(page_size: int) -> None:
    with toy_engine(page_size=page_size) as engine:
        assert tree.run(engine, 4, 2).totals.hit_rate >= 0.99


@rt.function
def turns(s: rt.State, n: int, stop: str | None = None) -> None:
    s.system(RULES)
    for i in range(n):
        s.user(f"Question {i}?")
        s.assistant(rt.gen(f"a{i}", max_tokens=10, stop=stop or ()))


def test_a_chain_is_one_request_with_the_answers_of_single_ones(engine: Engine) -> None:
    @rt.function
    def one_by_one(s: rt.State, n: int) -> None:
        s.system(RULES)
        for i in range(n):
            s.user(f"Question {i}?")
            s.assistant(rt.gen(f"a{i}", max_tokens=10))
            s[f"a{i}"]

    chained, single = turns.run(engine, 4), one_by_one.run(engine, 4)
    assert (chained.totals.requests, single.totals.requests) == (1, 4)
    assert chained.text == single.text


def test_cache_on_and_off_agree() -> None:
    texts = []
    for cache in (True, False):
        with toy_engine(prefix_cache=cache) as engine:
            result = tree.run(engine, 3, 2)
            texts.append([span for _, spans in result.record.branches.values() for span in spans])
            assert (result.totals.reused > 0) == cache
    assert texts[0] == texts[1]


def test_forked_is_sequential(engine: Engine) -> None:
    @rt.function
    def forked(s: rt.State, ends: list[str]) -> Any:
        s += RULES
        branches = s.fork(len(ends))
        for branch, end in zip(branches, ends, strict=True):
            branch += end
            branch += rt.gen("a", max_tokens=9)
        return branches.values("a")

    @rt.function
    def alone(s: rt.State, end: str) -> Any:
        s += RULES + end
        s += rt.gen("a", max_tokens=9)
        return s["a"]

    ends = ["x", "xy", " z", "\n", "é"]
    assert forked.run(engine, ends).value == [alone.run(engine, end).value for end in ends]


def test_select_is_cold_equals_warm_and_scores_one_message(engine: Engine) -> None:
    @rt.function
    def choose(s: rt.State) -> Any:
        s.user("Pick.")
        s.assistant("I pick ", rt.select("pick", ["alpha", "beta", "gamma"]), ".", rt.gen("why", max_tokens=4))
        return s.info("pick").scores

    cold = choose.run(engine)
    warm = choose.run(engine)
    assert cold.value == warm.value
    assert cold.totals.messages == 2
    assert warm.totals.prefilled < cold.totals.prefilled


def test_choices_share_their_own_beginnings(engine: Engine) -> None:
    beginning = "the long way round the lake, past the mill and the old bridge, to the house "

    @rt.function
    def choose(s: rt.State) -> Any:
        s += RULES + "Take "
        s += rt.select("way", [beginning + end for end in ("one", "two", "three", "four")])
        return s["way"]

    totals = choose.run(engine).totals
    assert (totals.requests, totals.messages) == (4, 1)
    assert totals.prefilled < len(RULES) + len("Take ") + len(beginning) + 4 * 8 + 8
    assert totals.hit_rate >= 0.99


def test_a_batch_prefills_its_common_beginning_once(engine: Engine) -> None:
    @rt.function
    def ask(s: rt.State, topic: str) -> Any:
        s.system(RULES * 4)
        s.user(f"In one word: {topic}")
        s.assistant(rt.gen("a", max_tokens=4))
        return s["a"]

    items = [f"the colour of things number {i}" for i in range(20)]
    batch = ask.run_batch(engine, items, progress=False)
    assert batch.totals.requests == 21
    assert batch.totals.hit_rate >= 0.99
    assert batch.totals.prefilled < len(RULES) * 4 + 200 + 20 * 40
    assert [result.value for result in batch] == [ask.run(engine, item).value for item in items]


def test_everything_is_released_after_errors(engine: Engine) -> None:
    @rt.function
    def fails(s: rt.State) -> None:
        s += RULES
        with s.fork(4) as branches:
            branches += rt.gen("a", max_tokens=12000, ignore_eos=True)
            s._run.kick()
            raise ValueError("no")

    @rt.function
    def late(s: rt.State) -> Any:
        s += RULES
        s += rt.gen("a", max_tokens=12000, ignore_eos=True, deadline=0.05)
        return s["a"]

    @rt.function
    def too_long(s: rt.State) -> Any:
        s += "x" * 17000
        s += rt.gen("a")
        return s["a"]

    with contextlib.suppress(ValueError):
        fails.run(engine)
    with pytest.raises(DeadlineExceeded):
        late.run(engine)
    with pytest.raises(GenerationFailed, match="maximum context length"):
        too_long.run(engine)
    idle(engine)


def test_a_race_aborts_the_losers(engine: Engine) -> None:
    @rt.function
    def race(s: rt.State) -> Any:
        s += RULES
        branches = s.fork(["short", "long"])
        branches["short"].add(rt.gen("a", max_tokens=3))
        branches["long"].add(rt.gen("a", max_tokens=12000, ignore_eos=True))
        return [winner.name for winner in branches.race(1)]

    assert race.run(engine).value == ["short"]
    idle(engine)
    assert engine.stats()["aborted"] >= 1


def test_typed_values_over_the_real_grammars(engine: Engine) -> None:
    @rt.tool
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    @rt.function
    def program(s: rt.State) -> Any:
        s.user("Go.")
        s.assistant("Yes: ", rt.gen("yes", bool), " n: ", rt.gen("n", int), rt.gen("c", choices=["aa", "ab"]))
        s += double.call("r", max_tokens=200)
        return s["yes"], s["n"], s["c"], s["r"]

    yes, n, c, r = program.run(engine).value
    assert type(yes) is bool
    assert type(n) is int
    assert c in ("aa", "ab")
    assert r.value == 2 * r.arguments["x"]


async def test_many_programs_at_once(engine: Engine) -> None:
    results = await asyncio.gather(*(tree.arun(engine, 2, 2) for _ in range(5)))
    assert len({result.text for result in results}) == 1
    await asyncio.sleep(0)


async def test_whoever_does_not_read_along_is_told_once(engine: Engine) -> None:
    def asked(stream: bool) -> Submit:
        return Submit(
            rid="",
            tokens=pack_ids(range(40, 60)),
            params=SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0),
            stream=stream,
        )

    late = [delta async for delta in engine.generator.stream(asked(False))]
    live = [delta async for delta in engine.generator.stream(asked(True))]
    assert len(late) == 1
    assert late[0].token_ids == tuple(token for delta in live for token in delta.token_ids)
    assert late[0].text == "".join(delta.text for delta in live)
