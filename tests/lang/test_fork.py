"""Branches: planned together, joined by tokens, raced, cancelled with their scope."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ramet as rt
from frontend_lang.errors import (
    BranchCancelled,
    DeadlineExceeded,
    InvalidPiece,
    ScopeClosed,
    UnknownVariable,
)
from tests.lang.fake import FakeBackend


def test_siblings_travel_in_one_message_and_say_how_many_they_are(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "the cat"
        s += rt.gen("a")
        branches = s.fork(4)
        for branch in branches:
            branch += " and " + branch.name
            branch += rt.gen("b")
        return branches.values("b")

    result = program.run(backend)
    assert len(result.value) == 4
    assert [len(message) for message in backend.messages] == [1, 4]
    assert backend.requests[0].hints.expected_fanout == 4
    (first,), rest = backend.messages
    assert {request.hints.parent_id for request in rest} == {first.hints.program_id}
    assert len({request.hints.program_id for request in rest}) == 4


def test_every_request_says_how_many_steps_of_its_branch_follow(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "the cat"
        s += rt.gen("a", n=2)
        s += " sat on "
        s += rt.gen("b")
        s += rt.gen("c", deadline=30.0)  # a request of its own, as is what follows
        s += rt.select("d", ["mat", "hat"])
        return s["d"]

    program.run(backend)
    depths = [request.hints.depth for request in backend.requests]
    assert depths == [3, 0, 2, 1, 0, 0]  # of two samples and of two choices, one at most goes on


@pytest.mark.parametrize("text", [None, ""])
def test_fork_before_any_text(backend: FakeBackend, text: str | None) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        if text is not None:
            s += text
        branches = s.fork(2)
        for branch in branches:
            branch += "the cat" + branch.name
            branch += rt.gen("a")
        return branches.values("a")

    assert len(program.run(backend).value) == 2


def test_a_fork_in_the_middle_of_a_word_joins_as_the_tokenizer_would(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "the o"
        for branch in s.fork(["an", "er"]):
            branch += branch.name + " cat"
            branch += rt.gen("a")

    program.run(backend)
    texts = [backend.tokenizer.encode(f"the o{end} cat") for end in ("an", "er")]
    from runtime.messages import unpack_ids

    assert [list(unpack_ids(request.tokens))[1:] for request in backend.requests] == texts


def test_labels_values_and_iadd(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        with s.fork(["left", "right"]) as branches:
            branches += " goes"
            branches += rt.gen("way")
            return branches["left"]["way"], branches.values("way")

    left, both = program.run(backend).value
    assert both == [left, left]


def test_join_splices_text_as_text_and_ids_as_ids(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "the"
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            branch += f" {i}:"
            branch += rt.gen("a", max_tokens=2)
        branches.join(sep="\n")
        s += " so"
        s += rt.gen("end")
        s["end"]

    result = program.run(backend)
    made = [backend.generated[0], backend.generated[1]]
    assert result.text == f"the 0:{made[0]}\n 1:{made[1]} so{result['end']}"
    assert not any(m in text for m in made for text in backend.encoded)


def test_variables_of_the_parent_are_read_through_a_branch(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a")
        branch = s.fork(1)[0]
        branch += rt.gen("b")
        with pytest.raises(UnknownVariable, match="'b'"):
            s["b"]
        return branch["a"] == s["a"], branch["b"] is not None

    assert program.run(backend).value == (True, True)


def test_race_keeps_the_first_and_cancels_the_rest(backend: FakeBackend) -> None:
    for name in ("1", "2"):
        backend.hold[name] = asyncio.Event()

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        branches = s.fork(3)
        branches += rt.gen("a")
        winners = branches.race(1)
        with pytest.raises(BranchCancelled, match="race"):
            branches[1]["a"]
        with pytest.raises(ScopeClosed):
            branches[2].add("more")
        return [winner.name for winner in winners]

    assert program.run(backend).value == ["0"]
    assert backend.live == set()
    assert len(backend.aborted) == 2


def test_a_deadline_cancels_what_is_late_only(backend: FakeBackend) -> None:
    backend.hold["slow"] = asyncio.Event()

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        branches = s.fork(["quick", "slow"], deadline=0.1)
        branches += rt.gen("a")
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            branches["slow"]["a"]
        return branches["quick"]["a"]

    assert program.run(backend).value
    assert backend.live == set()


def test_a_runs_deadline(backend: FakeBackend) -> None:
    backend.hold["main"] = asyncio.Event()

    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        s += rt.gen("a")
        return s["a"]

    with pytest.raises(DeadlineExceeded, match="main"):
        program.run(backend, deadline=0.05)
    assert backend.live == set()


def test_an_error_in_a_scope_cancels_its_branches(backend: FakeBackend) -> None:
    backend.hold = {"0": asyncio.Event(), "1": asyncio.Event()}

    @rt.function
    def program(s: rt.State) -> None:
        s += "go"
        with s.fork(2) as branches:
            branches += rt.gen("a")
            s._run.kick()
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="own"):
        program.run(backend)
    assert backend.live == set()


def test_a_branch_is_dead_after_its_scope(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        with s.fork(2) as branches:
            branches += rt.gen("a")
        assert branches[0]["a"]  # values stay
        with pytest.raises(ScopeClosed, match=r"branch '0', test_fork\.py:"):
            branches[0].add("more")

    program.run(backend)


def test_a_fork_inside_a_message(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s.user("go")
        with s.assistant():
            s += "I say"
            branches = s.fork(2)
            for branch in branches:
                branch += rt.gen("a")
                branch.close_role()
                branch.user("why " + branch.name)
                branch.assistant(rt.gen("b"))
            s += branches[0]["a"]
        return branches.values("b")

    result = program.run(backend)
    assert len(set(result.value)) == 2
    assert result.text.endswith("<|end|>\n")
    assert result.record.branches["1"][0] == "main"


def test_nested_forks_have_names_of_their_own(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += "go"
        names = []
        for _ in range(2):
            for branch in s.fork(2):
                for leaf in branch.fork(["x", "y"]):
                    leaf += rt.gen("a")
                    names.append(leaf.name)
        return names

    names = program.run(backend).value
    assert len(set(names)) == 8
    assert names[:2] == ["0.x", "0.y"]


@pytest.mark.parametrize("bad", [0, -1, True, 10**6, "ab", [], ["a", "a"], [1], None])
def test_bad_forks(backend: FakeBackend, bad: Any) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s.fork(bad)

    with pytest.raises(InvalidPiece, match="program 'program', branch 'main'"):
        program.run(backend)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([" cat", " dog", "the", "er", "\n"]), min_size=1, max_size=4, unique=True))
def test_forked_is_sequential(endings: list[str]) -> None:
    """At temperature 0 a branch says what a program of its own would."""

    @rt.function
    def forked(s: rt.State) -> Any:
        s += "the sun"
        s += rt.gen("first", max_tokens=2)
        branches = s.fork(len(endings))
        for branch, ending in zip(branches, endings, strict=True):
            branch += ending
            branch += rt.gen("a")
        return branches.values("a")

    @rt.function
    def alone(s: rt.State, ending: str) -> Any:
        s += "the sun"
        s += rt.gen("first", max_tokens=2)
        s["first"]
        s += ending
        s += rt.gen("a")
        return s["a"]

    assert forked.run(FakeBackend()).value == [alone.run(FakeBackend(), ending).value for ending in endings]


def test_every_reusable_token_is_reused(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s.system("the cat and the dog " * 10)
        for branch in s.fork(3):
            branch.user("go " + branch.name)
            branch.assistant(rt.gen("a"))
            for leaf in branch.fork(2):
                leaf.user("more " + leaf.name)
                leaf.assistant(rt.gen("b"))

    totals = program.run(backend).totals
    assert totals.requests == 9
    assert totals.hit_rate >= 0.99
