"""Each construct, on a toy backend, with what it sends."""

from __future__ import annotations

import dataclasses
import enum
import io
import itertools
import sys
from typing import Any, Literal

import numpy as np
import pydantic
import pytest

import ramet as rt
from frontend_lang.context import Context
from frontend_lang.errors import GenerationFailed, IncompleteValue, InvalidPiece
from frontend_lang.ir import Text
from runtime.messages import unpack_ids
from tests.lang.fake import WORDS, FakeBackend


def prompt_of(backend: FakeBackend, index: int) -> str:
    return backend.tokenizer.text(unpack_ids(backend.requests[index].tokens))


def test_text_and_gen(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State, who: str) -> str:
        s += "the " + who + " is"
        s += rt.gen("what", max_tokens=2)
        return s["what"]

    result = program.run(backend, who="cat")
    assert result.value == result["what"]
    assert result["what"].split()[0] in WORDS
    assert result.text == f"the cat is{result['what']}"
    assert prompt_of(backend, 0) == "<|doc|>the cat is"


def test_roles_are_rendered_by_the_models_template(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s.system("You name pets.")
        with s.user():
            s += "Name "
            s += "this."
        s.assistant(rt.gen("name"))
        s.user("Why?")
        s.assistant("Since", rt.gen("why"))

    result = program.run(backend)
    assert result.text == (
        "<|begin|>system\nYou name pets.<|end|>\n<|begin|>user\nName this.<|end|>\n<|begin|>assistant\n"
        f"{result['name']}<|end|>\n<|begin|>user\nWhy?<|end|>\n<|begin|>assistant\nSince{result['why']}<|end|>\n"
    )


def test_a_template_that_adds_a_system_message_adds_it_once(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s.user("hi")
        s.assistant(rt.gen("a"))
        s.user("again")

    assert program.run(backend).text.count("be kind") == 1


def test_a_chain_is_one_request_and_generated_ids_stay_as_they_are(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s.user("one")
        s.assistant(rt.gen("a"))
        s.user("two")
        s.assistant(rt.gen("b"))
        s.user("three")
        s.assistant(rt.gen("c"))

    program.run(backend)
    assert len(backend.requests) == 1
    assert len(backend.requests[0].segments) == 2
    assert not any(made in text for made in backend.generated for text in backend.encoded)


def test_a_chain_gives_what_single_requests_give(backend: FakeBackend) -> None:
    from frontend_lang.backend import Abilities

    @rt.function
    def program(s: rt.State) -> None:
        s += "the cat"
        s += rt.gen("a", max_tokens=2)
        s += " and the dog"
        s += rt.gen("b", max_tokens=2)

    single = FakeBackend(able=Abilities(segments=False))
    assert program.run(backend).text == program.run(single).text
    assert (len(backend.requests), len(single.requests)) == (1, 2)


def test_a_stop_string_never_stays(backend: FakeBackend) -> None:
    backend.answers = {"Q:": " red cat\n\nmoon"}

    @rt.function
    def program(s: rt.State) -> None:
        s += "Q:"
        s += rt.gen("a", stop="\n")
        s += "\n"
        s += rt.gen("b")

    result = program.run(backend)
    assert result["a"] == " red cat"
    assert result.text.startswith("Q: red cat\n")
    assert len(backend.requests) == 1
    assert backend.tokenizer.text(backend.seen[-1]).startswith("<|doc|>Q: red cat\n" + result["b"][:4])


def test_a_stop_inside_a_token_leaves_the_text_before_it(backend: FakeBackend) -> None:
    backend.answers = {"Q:": " red the"}

    @rt.function
    def program(s: rt.State) -> None:
        s += "Q:"
        s += rt.gen("a", stop="he")  # inside the token " the"
        s += "!"
        s += rt.gen("b")

    result = program.run(backend)
    assert result["a"] == " red t"
    assert result.text.startswith("Q: red t!")
    assert [prompt_of(backend, i) for i in (0, 1)] == ["<|doc|>Q:", "<|doc|>Q: red t!"]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Pet:
    name: str
    age: int


class Owner(pydantic.BaseModel):
    pets: list[Pet]
    kind: Literal["cat", "dog"]


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (int, lambda v: type(v) is int),
        (float, lambda v: type(v) is float),
        (bool, lambda v: type(v) is bool),
        (Literal["a", "b"], lambda v: v in ("a", "b")),
        (Literal[1, 2], lambda v: v in (1, 2)),
        (Color, lambda v: isinstance(v, Color)),
        (Pet, lambda v: isinstance(v, Pet) and isinstance(v.age, int)),
        (Owner, lambda v: isinstance(v, Owner) and len(v.pets) == 2),
        (list[int], lambda v: all(type(x) is int for x in v)),
    ],
)
def test_typed_gens_come_back_as_values(backend: FakeBackend, kind: Any, check: Any) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        value = rt.gen("v", kind)
        s += value
        return s[value]

    value = program.run(backend).value
    assert check(value), value
    assert backend.requests[0].grammar is not None


def test_regex_schema_and_choices(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += rt.gen("r", regex="[0-9]")
        s += rt.gen("j", json_schema={"type": "object", "properties": {"x": {"type": "integer"}}})
        s += rt.gen("c", choices=["x", "y"])

    result = program.run(backend)
    assert result["r"].isdigit()
    assert isinstance(result["j"]["x"], int)
    assert result["c"] in ("x", "y")


def test_n_gives_a_list_and_the_branch_goes_on_with_the_first(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "the"
        s += rt.gen("a", n=3)
        s += rt.gen("b")

    result = program.run(backend)
    assert len(result["a"]) == 3
    assert len(set(result["a"])) > 1
    assert result.text.startswith("the" + result["a"][0])
    assert [len(message) for message in backend.messages] == [3, 1]
    assert len({request.params.seed for request in backend.requests[:3]}) == 3


def test_temperature_none_takes_the_runs(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> None:
        s += "x"
        s += rt.gen("a", temperature=None)
        s += "y"
        s += rt.gen("b", temperature=0.25)

    program.run(backend, temperature=0.5)
    assert backend.requests[0].params.temperature == 0.5
    assert backend.requests[0].segments[0].params.temperature == 0.25


def test_the_same_seed_gives_the_same_run(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> str:
        for branch in s.fork(3):
            branch += rt.gen("a")
        s += rt.gen("b")
        return s["b"]

    texts = [program.run(FakeBackend(), temperature=1.0, seed=seed).value for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_sub_programs_share_the_state(backend: FakeBackend) -> None:
    @rt.function
    def describe(s: rt.State, what: str) -> str:
        s += f" the {what} is"
        s += rt.gen("look")
        return what.upper()

    @rt.function
    def program(s: rt.State) -> str:
        s += "So"
        s += describe("cat")
        return s.call(describe, what="dog") + s["look"]

    result = program.run(backend)
    assert result.value.startswith("DOG")
    assert result.text.startswith("So the cat is")
    assert " the dog is" in result.text


def test_streaming_by_variable(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> list[str]:
        s += "the"
        s += rt.gen("a")
        return list(s.stream("a"))

    result = program.run(backend)
    assert len(result.value) == 2
    assert "".join(result.value) == result["a"]


def test_loops_and_plain_control_flow(backend: FakeBackend) -> None:
    backend.answers = {"1:": "no", "2:": "no", "3:": "yes"}

    @rt.function
    def program(s: rt.State) -> int:
        for turn in range(1, 9):
            s += f"{turn}:"
            s += rt.gen("done")
            if s["done"] == "yes":
                return turn
        return 0

    assert program.run(backend).value == 3


def test_info_tells_how_a_value_came_about(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("a", max_tokens=1)
        return s.info("a")

    info = program.run(backend).value
    assert info.finish == "length"
    assert len(info.token_ids) == 1


def test_a_cut_value_raises_where_it_is_read(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State) -> Any:
        s += rt.gen("pet", Pet, max_tokens=3)
        return s["pet"]

    with pytest.raises(IncompleteValue, match="max_tokens=3") as caught:
        program.run(backend)
    assert caught.value.text.startswith("{")
    assert caught.value.where.line


def test_names_of_options_are_reserved() -> None:
    with pytest.raises(InvalidPiece, match="temperature"):

        @rt.function
        def program(s: rt.State, temperature: float) -> None:
            s += "x"


def test_arguments_are_checked_before_anything_runs(backend: FakeBackend) -> None:
    @rt.function
    def program(s: rt.State, x: int) -> None:
        s += str(x)

    with pytest.raises(InvalidPiece, match="required argument"):
        program.run(backend, y=1)
    assert backend.messages == []


def test_whatever_was_generated_is_sent_on_unchanged(backend: FakeBackend) -> None:
    """Every prompt of a branch begins with the ids of the one before it and what came of it."""

    @rt.function
    def program(s: rt.State) -> None:
        for turn in range(4):
            s.user(f"turn {turn}")
            s.assistant(rt.gen("a"))
            s["a"]

    program.run(backend)
    prompts = [np.asarray(unpack_ids(request.tokens)) for request in backend.requests]
    for earlier, later in itertools.pairwise(prompts):
        assert np.array_equal(earlier, later[: len(earlier)])
    assert not any(made and made in text for made in backend.generated for text in backend.encoded)


def test_tokens_that_change_after_they_were_read_are_counted(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None ever does; the counter would say so."""

    @rt.function
    def program(s: rt.State) -> None:
        for turn in range(3):
            s.user(f"turn {turn}")
            s.assistant(rt.gen("a"))
            s["a"]

    assert program.run(backend).totals.retokenised == 0
    commit = Context.commit

    async def careless(self: Context) -> Any:
        ids = await commit(self)
        ids[-40:] = type(ids)("i", await self._codec.encode([Text(self.text[-40:])]))
        return ids

    monkeypatch.setattr(Context, "commit", careless)
    assert program.run(FakeBackend()).totals.retokenised > 0


def test_a_batch_shows_its_progress(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    @rt.function
    def ask(s: rt.State, i: int) -> None:
        s += f"item {i}"
        s += rt.gen("a")

    monkeypatch.setattr("sys.stderr", Terminal())
    ask.run_batch(backend, range(5))
    assert "ask" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "5/5" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setattr("sys.stderr", Terminal())
    ask.run_batch(backend, range(5), progress=False)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_name_written_again_hides_the_older_value_but_not_from_its_construct(backend: FakeBackend) -> None:
    word, number = rt.gen("a"), rt.gen("a", int)

    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        s += word
        first = s["a"]
        s += " y "
        s += number
        child = s.fork(1)[0]
        return first, s[word], s[number], s["a"], child[word], s.info(word).text, s.names()

    first, *again, newer, by_name, of_branch, text, names = program.run(backend).value
    assert again == [first]
    assert first == of_branch == text
    assert isinstance(newer, int)
    assert by_name == newer
    assert names == ["a"]


def test_a_hidden_value_fails_with_its_branch_too(backend: FakeBackend) -> None:
    backend.fail_branch = "main"

    @rt.function
    def program(s: rt.State) -> Any:
        s += "x"
        s += rt.select("a", ["red", "blue"])
        older = s.stream("a")
        s += rt.gen("a")
        return list(older)

    with pytest.raises(GenerationFailed):
        program.run(backend)
