"""Everything at once, at random: submit, fork, abort, retract, stop, deadlines, failed steps, tiny pools.

After every turn the full audit runs; the fake device checks every page read; at the end the pool is whole and
every answer is what its request would have said alone.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from runtime.execute.fake import FakeRunner, fake_spec
from runtime.messages import Hints
from runtime.request import Phase
from runtime.scheduler.policy import POLICIES
from runtime.scheduler.retract import retract
from tests.runtime.fake_grammar import FakeGrammars, spec_of
from tests.runtime.world import Clock, World, alone, make_submit

CONTEXT = 192
TRUNK = [2 + (7 * i + i * i) % 60 for i in range(150)]


class Soak:
    """One random run; `wanted` holds what each request must say."""

    def __init__(self, seed: int, overlap: bool, **options: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.more = more = random.Random(seed + 7919)  # what came later; the rest is as it was
        self.page_size = rng.choice([1, 2, 4, 16])
        pool = rng.choice([128, 256, 1024])
        self.fail_at: set[int] = set()
        runner = FakeRunner(
            fake_spec(64, CONTEXT),
            n_pages=max(8, pool // self.page_size),
            page_size=self.page_size,
            max_running=rng.choice([1, 3, 8]),
            **options,
        )
        self.clock = Clock()
        self.world = World(
            overlap=overlap,
            runner=runner,
            clock=self.clock,
            grammar=FakeGrammars(),
            schedule_policy=rng.choice(sorted(POLICIES)),
            eviction_policy=more.choice(["lru", "lfu", "slru", "priority", "hints"]),
            cache_floors=more.choice([None, '{"": 32}']),
            max_step_tokens=rng.choice([8, 32, 128]),
            chunk_tokens=rng.choice([8, 64]),
        )
        self.asked: dict[str, tuple[list[int], dict[str, Any]]] = {}

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.clock.now += 0.01
            roll = self.rng.random()
            if roll < 0.3 and len(self.world.state.live) < 16:
                self._ask()
            elif roll < 0.34 and self.world.state.live:
                self.world.abort(self.rng.choice(list(self.world.state.live)))
            elif roll < 0.35:
                self.world.abort(group="g1")
            self._interfere()
            self.world.turn()
        self.world.run(20_000)

    def check(self, every: int = 1) -> int:
        """Compare with runs alone; returns how many were compared."""
        n, most = 0, self.world.state.limits.max_len  # a small pool bounds the answer as a small context does
        for i, (rid, (prompt, options)) in enumerate(self.asked.items()):
            said = self.world.said[rid]
            assert said.finish is not None
            if said.finish.reason in ("abort", "error") or i % every:
                continue
            runner = {"page_size": 8, "n_pages": 64, "context_length": most, "max_step_tokens": 512}
            world = {**runner, "chunk_tokens": 512, "grammar": FakeGrammars(), "max_running": 1}
            want = alone(prompt, world={**world, "jump_forward": False}, **options)
            got = (said.segments, said.finishes, said.logprobs, said.prompt_logprobs)
            assert got == (want.segments, want.finishes, want.logprobs, want.prompt_logprobs), (rid, prompt, options)
            n += 1
        return n

    def _interfere(self) -> None:
        """Take somebody back though there is room, or forget what nobody holds, while a step may be in flight."""
        roll, state = self.more.random(), self.world.state
        if roll < 0.03:
            running = [r for r in state.rows.running() if r.phase is not Phase.DRAIN]
            if running:
                retract(state, self.more.choice(running))
        elif roll < 0.04:
            self.world.call("pause", retract=self.more.random() < 0.5)
            self.world.call("flush")
            self.world.call("resume")

    # -- what is asked -------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        rng, n = self.rng, len(self.asked)
        prompt, options = self._prompt(), self._options()
        extra: dict[str, Any] = {
            "priority": rng.randrange(3),
            "client": rng.choice("xy"),
            "group": rng.choice(["", "g1", "g2"]),
            "hints": Hints(program_id=rng.choice([None, "p", "q"]), final=rng.random() < 0.2),
            "timeout_s": rng.choice([None] * 9 + [0.3]),
        }
        if rng.random() < 0.1:
            options["prompt_logprobs_from"] = rng.randrange(len(prompt))
        elif options["max_tokens"] == 0:
            places = sorted(self.more.choices(range(1, len(prompt) + 1), k=self.more.choice([0, 3])))
            options["scores"] = tuple((n, self.more.randrange(64)) for n in places)
        extra["hints"] = msgspec.structs.replace(extra["hints"], **self._advice())
        twins = [prompt]
        if len(prompt) < min(CONTEXT, self.world.state.limits.max_len) - 4:  # siblings of the same step
            twins += [[*prompt, self.more.randrange(2, 64)] for _ in range(self.more.choice([0, 0, 0, 1, 2]))]
        submits = []
        for i, twin in enumerate(twins, n):
            self.asked[f"r{i}"] = (twin, options)
            submits.append(make_submit(f"r{i}", twin, **options, **extra))
        self.world.ask_together(*submits)

    def _advice(self) -> dict[str, Any]:
        more = self.more
        return {
            "expect_return_s": more.choice([None, None, 0.1, 9.0]),
            "expected_fanout": more.choice([0, 0, 2]),
            "retain_ttl_s": more.choice([None, None, 0.5]),
            "parent_id": more.choice([None, "p"]),
        }

    def _prompt(self) -> list[int]:
        """A branch of the common trunk, or the next turn of an earlier request."""
        rng = self.rng
        room = min(CONTEXT, self.world.state.limits.max_len) - 2
        over = [rid for rid in self.asked if rid in self.world.said and self.world.said[rid].finish]
        if over and rng.random() < 0.3:
            rid = rng.choice(over)
            longer = self.asked[rid][0] + self.world.said[rid].tokens + [rng.randrange(64) for _ in range(3)]
            return longer[:room]
        n = rng.randrange(1, min(110, room))
        shared = TRUNK[: rng.randrange(n + 1)]
        return shared + [rng.randrange(2, 64) for _ in range(n - len(shared))]

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {"max_tokens": rng.choice([0, 1, 5, 30, 60])}
        choices: list[dict[str, Any]] = [
            {"ignore_eos": False},
            {"temperature": 1.0, "seed": rng.randrange(99)},
            {"frequency_penalty": 1.0},
            {"repetition_penalty": 1.3},
            {"logit_bias": {5: 3.0}, "min_tokens": min(3, options["max_tokens"])},
            {"stop": ("ab", "c")},
            {"logprobs": True, "top_logprobs": 2},
            {"grammar": spec_of([[5 + i % 9, 20] if i % 3 else [30] for i in range(rng.randrange(2, 12))])},
            {"grammar": spec_of([[5 + i] for i in range(rng.randrange(2, 12))])},
            {"segments": self._segments()},
        ]
        for choice in choices:
            if rng.random() < 0.15:
                options.update(choice)
        return options

    def _segments(self) -> list[tuple[list[int], dict[str, Any]]]:
        rng = self.rng
        first = ([3, 4, 5][: rng.randrange(4)], {"max_tokens": rng.choice([0, 4]), "stop": ("d",)})
        return [first, ([7], {"max_tokens": 3, "ignore_eos": False})]


@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("seed", range(5))
def test_random_work_leaves_the_pool_whole_and_every_answer_right(seed: int, overlap: bool) -> None:
    soak = Soak(seed, overlap)
    soak.run(350)
    assert soak.check(every=2) > 5


@pytest.mark.parametrize("seed", range(3))
def test_failing_steps_in_random_work_hurt_nobody_else(seed: int) -> None:
    soak = Soak(100 + seed, True, fail_at=range(20, 2000, 37))
    soak.run(250)
    assert soak.check(every=2) > 5
    assert soak.world.scheduler.stats()["steps_failed"] > 3


@pytest.mark.soak
@pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_long_random_work(seed: int, overlap: bool) -> None:
    soak = Soak(seed, overlap)
    soak.run(1500)
    assert soak.check() > 50
