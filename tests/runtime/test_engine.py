"""The Engine's door: prompts of every shape, options, streams, threads, the end. (Its scheduler only echoes.)"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ramet as rt
from runtime.config import EngineConfig
from runtime.errors import InvalidRequest, Unavailable
from runtime.messages import Submit
from runtime.params import SamplingParams
from tests.runtime.toys import ByteTokenizer, echo_parts


@pytest.fixture
def engine() -> Iterator[rt.Engine]:
    with rt.Engine.from_parts(echo_parts(EngineConfig())) as engine:
        yield engine


def text_of(submit: Submit) -> str:
    return ByteTokenizer().decode(submit.tokens[::4])


def test_one_prompt_gives_one_result(engine: rt.Engine) -> None:
    result = engine.generate("hello")
    assert result.text == "hello"
    assert result.token_ids == tuple(b"hello")
    assert (result.finish_reason, result.matched_stop, result.index) == ("length", None, 0)
    assert result.usage.completion_tokens == 1


@pytest.mark.parametrize("prompt", [list(b"ids"), tuple(b"ids"), np.array(list(b"ids")), [np.int32(c) for c in b"ids"]])
def test_token_ids_are_taken_as_they_are(engine: rt.Engine, prompt: Any) -> None:
    assert engine.generate(prompt).text == "ids"


def test_messages_are_rendered(engine: rt.Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert engine.generate(messages).text == engine.chat(messages).text == "User: hi\n\nAssistant:"


def test_a_list_of_prompts_gives_a_list_in_order(engine: rt.Engine) -> None:
    answers = engine.generate(["a", "b", "c"], n=2)
    assert [(one.text, one.index) for one in answers] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)
    ]  # fmt: skip
    assert [one.text for one in engine.generate([list(b"x"), list(b"y")])] == ["x", "y"]
    assert [one.text for one in engine.generate("solo", n=2)] == ["solo", "solo"]


def test_a_stream_joins_to_the_answer(engine: rt.Engine) -> None:
    deltas = list(engine.stream("hello"))
    assert "".join(delta.text for delta in deltas) == "hello"
    assert deltas[-1].finish is not None
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_leaving_a_stream_aborts_it(engine: rt.Engine) -> None:
    for delta in engine.stream("~" * 1000):
        assert delta.text
        break
    deadline = time.monotonic() + 5
    while engine.generator.n_live and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.generator.n_live == 0
    assert engine.call("stats") == {"running": 0}


def test_a_finished_stream_stays_finished(engine: rt.Engine) -> None:
    stream = engine.stream("x")
    assert [delta.text for delta in stream] == ["x"]
    with pytest.raises(StopIteration):
        next(stream)


def test_async_forms(engine: rt.Engine) -> None:
    async def both() -> tuple[str, str]:
        whole = await engine.agenerate("whole")
        parts = [delta.text async for delta in engine.astream("parts")]
        return whole.text, "".join(parts)

    assert asyncio.run(both()) == ("whole", "parts")


def test_abort_by_id_and_everything(engine: rt.Engine) -> None:
    results: list[Any] = []
    prompts = {"one": "~" * 1000, "two": "~" * 1001}
    threads = [
        threading.Thread(target=lambda rid=rid, text=text: results.append(engine.generate(text, rid=rid)))
        for rid, text in prompts.items()
    ]
    for thread in threads:
        thread.start()
    while engine.generator.n_live < 2:
        time.sleep(0.001)
    assert engine.abort("one") == 1
    assert engine.abort("nobody") == 0
    assert engine.abort() >= 1
    for thread in threads:
        thread.join()
    assert [one.finish_reason for one in results] == ["abort", "abort"]


def test_many_threads_share_an_engine(engine: rt.Engine) -> None:
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = engine.generate(f"thread {i}").text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"thread {i}" for i in range(20)}


# -- options -----------------------------------------------------------------------------------------------------


def test_options_reach_the_request(engine: rt.Engine) -> None:
    submit = engine.submit_of("x", temperature=0.5, stop="END", stop_token_ids=[7], seed=1, salt="s", priority=2)
    assert submit.params == SamplingParams(
        max_tokens=128, temperature=0.5, stop=("END",), stop_token_ids=(7,), seed=1
    )  # fmt: skip
    assert (submit.namespace.salt, submit.priority) == ("s", 2)


def test_given_params_are_not_capped(engine: rt.Engine) -> None:
    assert engine.submit_of("x", SamplingParams()).params.max_tokens is None
    assert engine.submit_of("x", SamplingParams(temperature=0.3), max_tokens=4).params == SamplingParams(
        temperature=0.3, max_tokens=4
    )


@pytest.mark.parametrize(
    ("option", "kind", "spec"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"json_schema": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x"),
        ({"choices": ["yes", "né"]}, "choices", '["yes","né"]'),
        ({"json_object": True}, "json_object", "{}"),
    ],
)
def test_grammars_are_canonical(engine: rt.Engine, option: dict[str, Any], kind: str, spec: str) -> None:
    grammar = engine.submit_of("x", **option).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.spec) == (kind, spec)


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([[]], {}, "prompt"),
        (None, {}, "prompt"),
        (7, {}, "prompt"),
        (b"bytes", {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([[1, "x"]], {}, "prompt"),
        ([[True]], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([300], {}, "prompt"),
        ([[["deep"]]], {}, "prompt"),
        (np.zeros((2, 2), np.int64), {}, "prompt"),
        (np.zeros(3), {}, "prompt"),
        ("x" * 5000, {}, "prompt"),
        ([{"role": "wizard", "content": "x"}], {}, "messages[0].role"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"top_p": 0}, "top_p"),
        ("x", {"top_k": 1.5}, "top_k"),
        ("x", {"max_tokens": -1}, "max_tokens"),
        ("x", {"max_tokens": 10**30}, "max_tokens"),
        ("x", {"seed": 1e40}, "seed"),
        ("x", {"logit_bias": {257: 1.0}}, "logit_bias"),
        ("x", {"logit_bias": {5: 1e300}}, "logit_bias"),
        ("x", {"stop": [""]}, "stop"),
        ("x", {"stop": ["x"] * 500_000}, "stop"),
        ("x", {"stop": 1.5}, "stop"),
        ("x", {"stop_token_ids": [None]}, "stop_token_ids"),
        ("x", {"top_logprobs": 1_000_000}, "top_logprobs"),
        ("x", {"n": 0}, "n"),
        ("x", {"n": 100_000}, "n"),
        ("x", {"temprature": 1.0}, "temprature"),
        ("x", {"regex": "a", "choices": ["b"]}, "choices"),
        ("x", {"json_schema": {1, 2}}, "json_schema"),
        ("x", {"timeout_s": float("inf")}, "timeout_s"),
        ("x", {"rid": "r" * 1000}, "rid"),
        (["x", "y"], {"rid": "twice"}, "rid"),
        ("half \ud800", {}, "prompt"),
        ([{"role": "user", "content": "half \ud800"}], {}, "messages"),
        ("x", {"regex": "\udc00"}, "regex"),
        ("x", {"stop": "\udfff"}, "stop"),
        ("x", {"stop": [1]}, "stop"),
        ("x", {"seed": "s", "n": 2}, "seed"),
        ("x", {"n": "2"}, "n"),
        ("x", {"n": 10**12}, "n"),
        ("x", {"temperature": 10**5000}, "temperature"),
        ("x", {"timeout_s": 10**400}, "timeout_s"),
        ("x", {"logit_bias": None}, "logit_bias"),
        ("x", {"params": {"max_tokens": 3}}, "params"),
        ("x", {"hints": {"final": True}}, "hints"),
        ("x", {"regex": 5}, "regex"),
        ("x", {"choices": 5}, "choices"),
        ("x", {"choices": "ab"}, "choices"),
        ("x", {"grammar": "a+"}, "grammar"),
    ],
)
def test_bad_input_is_named_and_the_engine_goes_on(
    engine: rt.Engine, prompt: Any, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate(prompt, **options)
    assert caught.value.param == param
    assert len(str(caught.value)) < 4096
    assert engine.generate("alive").text == "alive"


def test_a_misspelt_option_suggests_the_right_one(engine: rt.Engine) -> None:
    with pytest.raises(InvalidRequest, match="Did you mean temperature"):
        engine.generate("x", temprature=1.0)
    with pytest.raises(InvalidRequest, match="Did you mean page_size"):
        rt.Engine(page_sise=4)


def test_a_stream_takes_one_prompt(engine: rt.Engine) -> None:
    with pytest.raises(InvalidRequest, match="one prompt"):
        engine.stream(["a", "b"])


def test_a_stream_raises_in_the_caller(engine: rt.Engine) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        list(engine.stream("x", temperature=-1))


# -- the end -----------------------------------------------------------------------------------------------------


def test_a_dying_scheduler_is_told_to_everyone() -> None:
    engine = rt.Engine.from_parts(echo_parts(EngineConfig()))
    with pytest.raises(Unavailable, match="told to die"):
        engine.generate("!die")
    with pytest.raises(Unavailable, match="told to die"):
        engine.generate("x")
    with pytest.raises(Unavailable, match="told to die"):
        next(engine.stream("x"))
    engine.close()


def test_ctrl_c_aborts_what_it_interrupts(engine: rt.Engine) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        while not engine.generator.n_live:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)  # wakes a wait, as the terminal's does

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate("~" * 4000)
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 5
    while engine.generator.n_live and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.generator.n_live == 0
    assert engine.generate("on").text == "on"


def test_closing_ends_what_runs_and_refuses_more() -> None:
    engine = rt.Engine.from_parts(echo_parts(EngineConfig()))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            engine.generate("~" * 4000)
        except BaseException as err:
            caught.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    while not engine.generator.n_live and not caught:
        time.sleep(0.001)
    engine.close()
    engine.close()
    thread.join(10)
    assert [type(one) for one in caught] == [Unavailable]
    for use in (lambda: engine.generate("x"), lambda: engine.stream("x"), engine.stats):
        with pytest.raises(Unavailable, match="closed"):
            use()


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    with rt.Engine.from_parts(echo_parts(EngineConfig())) as engine:
        engine.generate("x")
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("ramet")}
