"""What goes first, policy by policy."""

from __future__ import annotations

import numpy as np
import pytest

from radix import Namespace, PrefixCache
from radix.rhythm import ALL, MAX_PROGRAMS, OWN, Rhythm
from tests.radix.helpers import NS, Client, Hints, ids, seq

A, B, C = (seq(8, start) for start in (1000, 2000, 3000))  # two pages each


def client(policy: str, n_pages: int = 16, **options: object) -> Client:
    return Client(PrefixCache(n_pages, 4, policy=policy, **options))  # type: ignore[arg-type]


def order(c: Client) -> str:
    """The order in which A, B and C lose their last page."""
    c.plan()  # tail copies are done
    left = {name: tokens for name, tokens in zip("ABC", (A, B, C), strict=True) if c.check_match(tokens)}
    out = ""
    while left:
        assert c.cache.evict(1)
        gone = [name for name, tokens in left.items() if not c.check_match(tokens)]
        out += "".join(gone)
        for name in gone:
            del left[name]
    return out


def wait(c: Client, seconds: int) -> None:
    for _ in range(seconds):
        c.plan()
        c.drain()


def test_lru_evicts_what_was_used_longest_ago() -> None:
    c = client("lru")
    for tokens in (A, B, C, A):
        c.serve(tokens)
    assert order(c) == "BCA"


def test_lfu_evicts_what_was_hit_least() -> None:
    c = client("lfu")
    for tokens in (A, A, A, B, B, C):
        c.serve(tokens)
    assert order(c) == "CBA"


def test_slru_evicts_what_was_never_hit() -> None:
    c = client("slru")
    for tokens in (A, A, B, C):
        c.serve(tokens)
    assert order(c) == "BCA"


def test_slru_bounds_the_share_of_what_was_hit() -> None:
    for n_pages, first_loser in ((12, C), (9, A)):  # four hit pages are within a third of twelve, not of nine
        c = client("slru", n_pages)
        for tokens in (A, B, C):
            c.serve(tokens)
        for tokens in (A, B):
            c.plan()
            c.end(c.start(tokens, limit=8))
        c.cache.evict(1)
        assert [t[0] for t in (A, B, C) if c.check_match(t, limit=8) < 8] == [first_loser[0]]


def test_priority_keeps_the_higher_while_its_time_lasts() -> None:
    c = client("priority")
    c.serve(A, hints=Hints(retain_ttl_s=10, retain_priority=2))
    c.serve(B, hints=Hints(retain_ttl_s=100, retain_priority=1))
    c.serve(C)
    assert order(c) == "CBA"
    c.cache.clear()
    c.serve(A, hints=Hints(retain_ttl_s=10, retain_priority=2))
    c.serve(B, hints=Hints(retain_ttl_s=100, retain_priority=1))
    c.serve(C)
    wait(c, 10)
    assert order(c) == "ACB"


def test_a_retention_may_be_shortened() -> None:
    c = client("priority")
    c.serve(A, hints=Hints(retain_ttl_s=100, retain_priority=1))
    c.serve(A, hints=Hints(retain_ttl_s=5, retain_priority=1))
    c.serve(B)
    wait(c, 5)
    c.audit()
    assert order(c) == "AB"


def test_a_negative_priority_goes_first() -> None:
    c = client("priority")
    for tokens in (A, B):
        c.serve(tokens)
    c.serve(C, hints=Hints(retain_priority=-1))
    assert order(c) == "CAB"


def test_hints_without_hints_is_lru() -> None:
    c = client("hints")
    for tokens in (A, B, C, A):
        c.serve(tokens)
    assert order(c) == "BCA"


def test_a_program_that_is_done_goes_first() -> None:
    c = client("hints")
    for tokens in (A, B):
        c.serve(tokens)
    c.serve(C, hints=Hints("c", final=True))
    assert order(c) == "CAB"
    assert c.cache.stats()["evicted_by"]["final"] == 2


def test_final_spares_what_others_use_too() -> None:
    c = client("hints", n_pages=32)
    shared = seq(8, 500)
    mine, yours = (ids(*shared, *own) for own in (A, B))
    c.serve(mine, hints=Hints("me"))
    c.serve(yours, hints=Hints("you"))
    c.serve(C)
    c.serve(mine, hints=Hints("me", final=True))
    c.plan()
    c.cache.evict(2)
    assert c.check_match(mine) == 8
    assert c.check_match(yours) == 15
    c.cache.evict(2)
    assert c.check_match(yours) == 8
    assert c.check_match(C) == 7


def test_final_condemns_every_branch_of_the_program() -> None:
    c = client("hints", n_pages=32)
    start = seq(8, 500)
    left, right = (ids(*start, *own) for own in (A, B))
    c.serve(left, hints=Hints("me"))
    c.serve(C)
    c.serve(right, hints=Hints("me", final=True))
    assert c.cache.evict(6) == 6
    assert (c.check_match(left), c.check_match(right), c.check_match(C)) == (0, 0, 7)


def test_a_program_that_comes_back_after_all_is_not_condemned() -> None:
    c = client("hints")
    c.serve(A, hints=Hints("a", final=True))
    c.serve(B)
    c.serve(A, hints=Hints("a"))
    assert order(c) == "BA"


def test_the_farthest_return_goes_first() -> None:
    c = client("hints")
    c.serve(A, hints=Hints("a", expect_return_s=5))
    c.serve(B, hints=Hints("b", expect_return_s=500))
    c.serve(C)
    assert order(c) == "BAC"


def test_a_leaf_gets_hotter_as_its_return_comes_near_and_ages_when_it_is_overdue() -> None:
    for seconds, expected in ((0, "ABC"), (15, "BCA"), (60, "BCA")):
        c = client("hints")
        c.serve(A, hints=Hints("a", expect_return_s=20))
        c.serve(B)
        c.serve(C)
        wait(c, seconds)
        assert order(c) == expected


def test_retained_paths_go_last_whoever_uses_them() -> None:
    c = client("hints", n_pages=32)
    c.serve(A, hints=Hints(retain_ttl_s=100))
    c.serve(ids(*A, *B), hints=Hints("b", final=True))
    c.serve(C)
    assert c.cache.evict(4) == 4
    assert c.check_match(A) == 7
    assert c.check_match(C) == 0


def test_a_floor_is_kept_while_others_have_pages() -> None:
    other = Namespace(adapter=1)
    c = client("lru", floors={NS: 3})
    for tokens in (A, B):
        c.serve(tokens)
    c.serve(C, other)
    assert c.cache.evict(1) == 1  # four pages, one above the floor
    assert c.cache.evict(2) == 2
    assert c.check_match(C, other) == 0
    assert (c.check_match(A), c.check_match(B)) == (4, 7)
    c.audit()
    assert c.cache.evict(2) == 2  # soft: nothing else is left
    c.serve(seq(12, 9000))
    c.audit()


def test_a_namespace_that_grows_above_its_floor_is_evicted_from_again() -> None:
    other = Namespace(adapter=1)
    c = client("lru", floors={NS: 3})
    c.serve(A)
    c.serve(C, other)
    assert c.cache.evict(1) == 1
    assert (c.check_match(A), c.check_match(C, other)) == (7, 4)  # A is older, but below the floor
    c.serve(B)
    assert c.cache.evict(1) == 1
    assert (c.check_match(A), c.check_match(C, other)) == (4, 4)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'; known: lru, lfu"):
        client("mru")


def test_fan_out_keeps_the_end_until_so_many_have_come() -> None:
    c = client("hints")
    c.serve(A, hints=Hints("a", expected_fanout=2))
    c.serve(B)
    c.serve(C)
    assert order(c)[-1] == "A"
    c.serve(A, hints=Hints("a", expected_fanout=1))
    c.serve(np.append(A, ids(1, 2)))  # the child has come
    wait(c, 2)
    c.serve(B)
    assert c.cache.evict(1) == 1
    assert c.check_match(B) == 7


def test_steps_that_are_left_keep_the_end_until_the_next_has_come() -> None:
    c = client("hints")
    c.serve(A, hints=Hints("a", depth=1))
    c.serve(B)
    c.serve(C)
    assert order(c)[-1] == "A"
    c.serve(A, hints=Hints("a", depth=1))
    c.serve(np.append(A, ids(1, 2)))  # the next step has come
    wait(c, 2)
    c.serve(B)
    assert c.cache.evict(1) == 1
    assert c.check_match(B) == 7


def test_the_more_steps_are_left_the_longer_they_keep_the_end_but_a_minute_at_most() -> None:
    for depth, seconds, last in ((1, 5, "C"), (2, 5, "A"), (4096, 50, "A"), (4096, 62, "C")):
        c = client("hints")
        c.serve(A, hints=Hints("a", depth=depth))
        c.serve(B)
        c.serve(C)
        wait(c, seconds)
        assert order(c)[-1] == last, depth


def test_depth_yields_to_whoever_says_when_or_that_it_is_over() -> None:
    for said in ({"expect_return_s": 500}, {"final": True}):
        c = client("hints")
        c.serve(A, hints=Hints("a", depth=9, **said))
        c.serve(B)
        assert order(c)[0] == "A"


def test_a_program_that_says_nothing_is_expected_when_it_usually_comes() -> None:
    c = client("hints", n_pages=32)
    for _ in range(3):  # "quick" is back after two seconds, always
        c.serve(A, hints=Hints("quick"))
        wait(c, 1)
    c.serve(B, hints=Hints("new"))
    c.serve(A, hints=Hints("quick"))
    assert c.cache.rhythm is not None
    assert c.cache.rhythm.expect("quick") == pytest.approx(2.0, abs=2.0)
    assert c.cache.rhythm.expect("never seen") == c.cache.rhythm.expect("quick")
    assert client("lru").cache.rhythm is None


def test_what_is_usual_is_learned_from_a_bounded_past() -> None:
    rhythm, now = Rhythm(), 0.0
    assert rhythm.expect("a") is None
    for i in range(3 * MAX_PROGRAMS):
        rhythm.gone(f"p{i % (2 * MAX_PROGRAMS)}", now)
        now += 5.0
        rhythm.came(f"p{i % (2 * MAX_PROGRAMS)}", now)
    assert rhythm.expect("p1") == 5.0
    assert len(rhythm._own) == MAX_PROGRAMS
    assert len(rhythm._sorted) == len(rhythm._ring) == ALL
    for _ in range(OWN):
        rhythm.gone("slow", now)
        now += 100.0
        rhythm.came("slow", now)
    assert rhythm.expect("slow") == 5.0  # never more than is usual for all
    rhythm.gone("slow", now)
    rhythm.came("slow", now + 1.0)
    assert rhythm.expect("slow") == 1.0
    rhythm.came("slow", now + 2.0)  # it was not away
    assert rhythm._own["slow"][-1] == 1.0
