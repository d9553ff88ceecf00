"""Any sequence of operations keeps the laws: hypothesis looks for short counterexamples, the soak for long ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.radix.world import SPACES, World

WHICH = st.integers(0, 7)


class CacheMachine(RuleBasedStateMachine):
    page_size, n_pages = 4, 24

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.page_size, self.n_pages)

    @rule(base=st.integers(0, 6), cut=st.integers(0, 90), fresh=st.integers(0, 80), slack=st.integers(0, 2))
    def serve(self, base: int, cut: int, fresh: int, slack: int) -> None:
        self.world.start(base, cut, fresh, slack, True)

    @rule(base=st.integers(0, 6), cut=st.integers(0, 90), fresh=st.integers(0, 80), slack=st.integers(0, 2))
    def start(self, base: int, cut: int, fresh: int, slack: int) -> None:
        self.world.start(base, cut, fresh, slack, False)

    @rule()
    def next_step(self) -> None:
        self.world.next_step()

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule()
    def fail(self) -> None:
        self.world.fail()

    @rule(which=WHICH, n=st.integers(1, 40), publish=st.booleans(), show=st.booleans())
    def prefill(self, which: int, n: int, publish: bool, show: bool) -> None:
        self.world.prefill(which, n, publish, show)

    @rule(which=WHICH, base=st.integers(0, 2), n=st.integers(1, 9))
    def generate(self, which: int, base: int, n: int) -> None:
        self.world.generate(which, base, n)

    @rule(which=WHICH)
    def advance(self, which: int) -> None:
        self.world.advance(which)

    @rule(which=WHICH)
    def publish_late(self, which: int) -> None:
        self.world.publish_late(which)

    @rule(which=WHICH, keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        self.world.finish(which, keep)

    @rule(n=st.integers(0, 12))
    def alloc(self, n: int) -> None:
        self.world.alloc(n)

    @rule(which=WHICH)
    def free(self, which: int) -> None:
        self.world.free(which)

    @rule(n=st.integers(1, 5))
    def evict(self, n: int) -> None:
        self.world.evict(n)

    @rule()
    def clear(self) -> None:
        self.world.clear()

    @invariant()
    def books_balance(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.teardown()


@pytest.mark.parametrize(("page_size", "n_pages"), [(1, 40), (4, 10), (4, 400), (16, 12)])
def test_any_sequence_of_operations_keeps_the_laws(page_size: int, n_pages: int) -> None:
    machine = type("Machine", (CacheMachine,), {"page_size": page_size, "n_pages": n_pages})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


# How often the soak does what: mostly requests, some pressure, rare catastrophes.
WEIGHTS = {
    "next_step": 20,
    "start": 18,
    "prefill": 18,
    "finish": 12,
    "commit": 8,
    "generate": 6,
    "advance": 5,
    "publish_late": 4,
    "evict": 3,
    "alloc": 2,
    "free": 3,
    "fail": 1,
    "clear": 1,
}


def soak(world: World, seed: int, n: int) -> None:
    """`n` weighted random operations, an audit after each, and a whole pool at the end."""
    rng = np.random.default_rng(seed)
    names = list(WEIGHTS)
    p = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    for name in rng.choice(names, size=n, p=p):
        i = [int(x) for x in rng.integers(0, 1000, 4)]
        args: dict[str, tuple[object, ...]] = {
            "start": (i[0], i[1], i[2] % 81, i[3] % 3, i[3] % 2 == 0),
            "prefill": (i[0], 1 + i[1] % (2 * world.cache.page_size + 3), i[2] % 4 > 0, i[3] % 2 == 0),
            "finish": (i[0], i[1] % 4 > 0),
            "generate": (i[0], i[1] % 3, 1 + i[2] % 9),
            "advance": (i[0],),
            "publish_late": (i[0],),
            "evict": (1 + i[0] % 4,),
            "alloc": (i[0] % 6,),
            "free": (i[0],),
        }
        getattr(world, name)(*args.get(str(name), ()))
        world.check()
    world.teardown()


@pytest.mark.parametrize(("page_size", "n_pages"), [(1, 60), (2, 30), (4, 24), (4, 500), (16, 16)])
@pytest.mark.parametrize("seed", range(3))
def test_soak(page_size: int, n_pages: int, seed: int) -> None:
    soak(World(page_size, n_pages), seed, 700)


@pytest.mark.parametrize("policy", ["lfu", "slru", "priority", "hints"])
def test_soak_with_every_policy_and_floors(policy: str) -> None:
    floors = {SPACES[0]: 8, SPACES[1]: 4}
    soak(World(4, 24, policy=policy, floors=floors), seed=7, n=700)
