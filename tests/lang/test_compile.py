"""What a program's trace knows before it runs, and what is done with it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import ramet as rt
from frontend_lang.compiler import constant_ids, trace
from frontend_lang.ir import Dynamic, Fork, Gen, RoleOpen, Text
from frontend_lang.session import prepare
from tests.lang.fake import FakeBackend


@rt.function
def program(s: rt.State, doc: str, question: str, k: int = 2) -> str:
    s.system("You read a document and answer questions about it with care.")
    s.user(f"The document: {doc}")
    s.assistant(rt.gen("first"), "! ", rt.gen("second", max_tokens=9))
    with s.fork(k) as branches:
        for branch in branches:
            branch.user(question)
            branch.assistant(rt.select("yes", ["YES", "NO"]))
    branches.join()
    s += f"{s['first']} again"
    if s["first"] == "cat":
        s += "a cat!"
    return s["first"]


def test_a_trace_is_the_programs_ir() -> None:
    tree = trace(program, ("the cat",))
    kinds = [type(step.node) for step in tree.steps]
    assert kinds[:2] == [RoleOpen, Text]
    assert kinds.count(Gen) == 2
    assert [step.node for step in tree.steps if isinstance(step.node, Fork)] == [Fork(("0", "1"))]
    (branches,) = tree.children.values()
    assert [branch.name for branch in branches] == ["0", "1"]
    last = tree.steps[-1].node
    assert isinstance(last, Dynamic)
    assert "'first'" in last.why


def test_explain_counts_tokens_and_says_what_is_shared(backend: FakeBackend) -> None:
    text = program.explain(backend, doc="the cat")
    assert "can be prefetched" in text
    assert "(same request as the gen before)" in text
    assert "branch '1'" in text
    assert "needs question" in text
    assert "decided at run time" in text
    assert "tokens shared" in text
    assert backend.messages == []
    assert "tokens are constant" not in program.explain()


def test_an_async_program_is_traced_too(backend: FakeBackend) -> None:
    @rt.function
    async def asynchronous(s: rt.State, x: str) -> None:
        s += "the " + x
        s += rt.gen("a")
        s += f" so {await s.get('a')}"
        async with s.fork(2) as branches:
            branches += rt.gen("b")
        await s.done()

    text = asynchronous.explain(backend)
    assert "{a}" in text
    assert "fork" in text


def test_draw_is_svg(backend: FakeBackend) -> None:
    root = ET.fromstring(program.draw(backend, doc="<&>"))
    assert root.tag.endswith("svg")
    words = [node.text for node in root.iter() if node.tag.endswith("}text")]
    assert "main" in words
    assert "0" in words


def test_what_looks_at_a_hole_ends_the_trace() -> None:
    @rt.function
    def looks(s: rt.State, items: list[str]) -> None:
        s += "before"
        for item in items:
            s += item

    nodes = [step.node for step in trace(looks).steps]
    assert nodes[0] == Text("before")
    assert isinstance(nodes[1], Dynamic)
    whole = [step.node for step in trace(looks, (["x", "y"],)).steps]
    assert whole == [Text("before"), Text("x"), Text("y")]


def test_sub_programs_are_traced_inline() -> None:
    @rt.function
    def inner(s: rt.State, x: str) -> None:
        s += f"inner {x}"

    @rt.function
    def outer(s: rt.State, x: str) -> None:
        s += inner(x=x)

    (step,) = trace(outer).steps
    assert step.node.text.startswith("inner ")  # type: ignore[union-attr]


async def test_the_constant_beginning_ends_where_the_tokenizer_could_still_change_it(backend: FakeBackend) -> None:
    @rt.function
    def short(s: rt.State, x: str) -> None:
        s += f"see the cat and the{x}"

    ids = await constant_ids(prepare(backend), trace(short))
    assert backend.tokenizer.text(ids) == "<|doc|>see the cat and"


def test_prefetch_sends_the_constant_beginning_once(backend: FakeBackend) -> None:
    n = program.prefetch(backend)
    assert n > 20
    (request,) = backend.requests
    assert request.params.max_tokens == 0
    program.run(backend, doc="the cat", question="why")
    first = next(request for request in backend.requests if request.params.max_tokens)
    assert first.tokens[: 4 * n] == backend.requests[0].tokens


def test_a_batch_prefetches_what_its_items_have_in_common(backend: FakeBackend) -> None:
    @rt.function
    def ask(s: rt.State, doc: str, question: str) -> Any:
        s += f"Read: {doc} and answer: {question}"
        s += rt.gen("a")
        return s["a"]

    doc = "the cat and the dog saw the sun"
    items = [{"doc": doc, "question": f"what is the colour of {what}"} for what in ("red", "blue", "moon")]
    batch = ask.run_batch(backend, items, progress=False)
    common = backend.tokenizer.text(backend.seen[0])
    assert common == f"<|doc|>Read: {doc} and answer: what is the colour of"
    assert backend.requests[0].hints.expected_fanout == 3
    assert batch.totals.requests == 4
    assert batch.totals.hit_rate >= 0.99


def test_what_a_batch_has_in_common_is_found_on_tokens(backend: FakeBackend) -> None:
    """A token counts if all items have it, though a word of one of them goes on behind it."""

    @rt.function
    def ask(s: rt.State, what: str) -> None:
        s += f"a long and constant beginning of it all: {what}."
        s += rt.gen("a")

    ask.run_batch(backend, ["go on the way", "go on them all"], progress=False)
    assert backend.tokenizer.text(backend.seen[0]).endswith("all: go on the")
    other = FakeBackend()
    ask.run_batch(other, ["go on catch", "go on cat"], progress=False)
    assert other.tokenizer.text(other.seen[0]).endswith("all: go on cat")
    third = FakeBackend()
    ask.run_batch(third, ["go on suns", "go on red"], progress=False)
    assert third.tokenizer.text(third.seen[0]).endswith("all: go on")


def test_user_code_beyond_the_beginning_does_not_run_in_a_prefetch(backend: FakeBackend) -> None:
    calls = []

    @rt.function
    def careful(s: rt.State, x: str) -> None:
        s += "a long and constant beginning of it all, for the cat"
        s += rt.gen("a")
        calls.append(x)

    careful.prefetch(backend)
    assert calls == []
