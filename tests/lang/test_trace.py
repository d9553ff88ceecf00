"""The record of a run: where every token came from, as data, as a file and as a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest

import ramet as rt
from frontend_lang import trace_page
from runtime.engine import Engine
from tests.lang.engines import toy_engine, toy_server
from tests.lang.fake import FakeBackend


@dataclass
class Form:
    colour: Literal["red", "blue"]
    urgent: bool


@rt.function
def garden(s: rt.State) -> None:
    s.system("You plan gardens with care, in few words, and you never forget the rain.")
    s.user("Fill in the form.")
    s.assistant("Here: ", rt.gen("form", Form), " done.", rt.gen("more", max_tokens=4, ignore_eos=True))
    with s.fork(["flowers", "grass"]) as branches:
        for branch in branches:
            branch.user(f"Plan it with {branch.name}, é.")
            branch.assistant(rt.gen("idea", max_tokens=9, ignore_eos=True), " Good: ", rt.select("good", ["Yes", "No"]))
    branches.join("\n")
    s.user("Which is best?")
    s.assistant(rt.gen("best", max_tokens=5))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


@pytest.fixture(params=["local", "http"])
def target(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Any]:
    if request.param == "local":
        yield engine
        return
    with toy_server(engine) as url:
        yield url


def test_every_token_knows_where_it_came_from(engine: Engine, target: Any) -> None:
    engine.flush()
    record = garden.run(target).record
    stories = {branch: record.story(branch) for branch in record.branches}
    for branch, (_, spans) in record.branches.items():
        told = "".join(piece.text for piece in stories[branch] if piece.kind not in ("generated", "forced"))
        literal = "".join(span.text for span in spans if not span.ids)
        assert all(part in told for part in ("user", "assistant"))
        assert len(told) >= len(literal)
    forced = [piece.text for piece in stories["main"] if piece.kind == "forced"]
    assert forced
    (form,) = [span.text for span in record.branches["main"][1] if span.name == "form"]
    assert all(text in form for text in forced)
    assert sum(piece.n_tokens for piece in stories["main"] if piece.kind == "forced") == record.totals().forced
    made = sum(p.n_tokens for story in stories.values() for p in story if p.kind in ("generated", "forced"))
    assert record.totals().generated - made in (0, 1)  # a final stop token does not stay
    first, second = stories["flowers"], stories["grass"]
    assert first[0].kind == "prefilled"  # the first to begin computes what its sibling reuses
    assert [piece.kind for piece in second][:2] == ["reused", "copied"]
    good = [(piece.kind, piece.text) for piece in first if piece.name == "good"]
    assert [kind for kind, _ in good] == ["prefilled", "unread"]  # a choice's last token is scored, not read
    assert len(good[1][1]) == 1
    spliced = {piece.kind for piece in stories["main"] if piece.name == "idea"}
    assert spliced == {"reused", "prefilled"}  # the first branch's story is in the cache at its place, the second's not
    assert all(piece.end_s >= piece.start_s >= 0 and piece.line for piece in first if piece.kind != "unread")


def test_a_saved_record_opens_as_the_same_page(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = garden.run(engine)
    page = result.save_trace(tmp_path / "direct.html").read_text()
    result.record.save(tmp_path / "run.json")
    monkeypatch.setattr(sys, "argv", ["trace_page", str(tmp_path / "run.json")])
    trace_page.main()
    assert (tmp_path / "run.html").read_text() == page
    steps = result.record.as_dict()["branches"]["main"]["steps"]
    assert [step["kind"] for step in steps if step["kind"] in ("gen", "fork", "join")] == [
        *("gen", "gen", "fork", "join", "gen")
    ]


class _Checker(HTMLParser):
    """Balanced tags, and nothing fetched from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_run_is_kept_as_one_page(backend: FakeBackend, tmp_path: Path) -> None:
    @rt.tool
    def now() -> str:
        """The time."""
        return "<noon> & later"

    @rt.function
    def program(s: rt.State) -> None:
        s.user("hi <b>")
        s.assistant(rt.gen("a"))
        s += now.call("t")
        for branch in s.fork(["left", "right"]):
            branch.user("go")
            branch.assistant(rt.gen("b"))

    result = program.run(backend)
    page = result.save_trace(tmp_path / "run.html").read_text()
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert "http" not in page.replace("http-equiv", "")
    assert "&lt;noon&gt; &amp; later" in page
    assert all(name in page for name in ("left", "right", "reused", "prefilled", "generated", "tool now"))
    data = result.record.as_dict()
    assert data["totals"]["requests"] == 4
    assert data["events"][0]["prompt_ids"]
    assert data["branches"]["left"]["parent"] == "main"
