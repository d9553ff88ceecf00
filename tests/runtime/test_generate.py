"""Generator and LocalClient against a scheduler that says what it is told."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from runtime.client import LocalClient
from runtime.config import EngineConfig
from runtime.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    RequestTimeout,
    Unavailable,
)
from runtime.execute.fake import fake_spec
from runtime.generate import Generator
from runtime.messages import Finish, Segment, Submit, SubmitMany, TokenLogprob, pack_ids
from runtime.params import SamplingParams
from tests.runtime.toys import EOS, ByteTokenizer, ToldScheduler

SPEC = fake_spec(vocab_size=257, context_length=64, eos_ids=(EOS,))


@pytest.fixture
def told() -> ToldScheduler:
    return ToldScheduler()


@pytest.fixture
def client(told: ToldScheduler) -> Iterator[LocalClient]:
    client = LocalClient(told, stall_s=60)
    yield client
    client.close()


@pytest.fixture
def generator(client: LocalClient) -> Generator:
    return Generator(client, ByteTokenizer(), SPEC, EngineConfig())


def ask(text: str = "hi", **more: object) -> Submit:
    params = more.pop("params", SamplingParams(max_tokens=8))
    return Submit(rid="", tokens=pack_ids(list(text.encode())), params=params, **more)  # type: ignore[arg-type]


async def arrived(told: ToldScheduler) -> Submit:
    """The next request to reach the scheduler."""
    return await asyncio.to_thread(told.arrived.get, timeout=5)


async def test_an_answer_streams_and_ends(generator: Generator, told: ToldScheduler) -> None:
    stream = generator.stream(ask())
    first = asyncio.ensure_future(anext(stream))
    request = await arrived(told)
    told.say(request.rid, "he")
    assert (await first).text == "he"
    told.end(request.rid, "y")
    last = await anext(stream)
    assert (last.text, last.token_ids, last.finish) == ("y", (ord("y"), EOS), Finish(reason="stop"))
    assert last.usage is not None
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert generator.n_live == 0
    assert told.aborted == []


async def test_a_slow_reader_gets_everything_merged(generator: Generator, told: ToldScheduler) -> None:
    stream = generator.stream(ask())
    first = asyncio.ensure_future(anext(stream))
    request = await arrived(told)
    told.say(request.rid, "a")
    assert (await first).text == "a"
    for letter in "bcd":
        told.say(request.rid, letter)
    told.end(request.rid, "e")
    await asyncio.to_thread(told.stop)
    await asyncio.sleep(0.05)
    rest = [delta async for delta in stream]
    assert "".join(delta.text for delta in rest) == "bcde"
    assert len(rest) < 4


async def test_n_answers_come_from_one_message_with_seeds_of_their_own(
    generator: Generator, told: ToldScheduler
) -> None:
    told.auto = lambda item: told.end(item.rid, f"seed {item.params.seed}")
    answers = await generator.complete(ask(params=SamplingParams(seed=2**64 - 1)), n=3)
    assert [(one.index, one.text) for one in answers] == [(0, f"seed {2**64 - 1}"), (1, "seed 0"), (2, "seed 1")]
    (message,) = told.got
    assert isinstance(message, SubmitMany)
    assert len({item.rid for item in message.items}) == 3


async def test_many_prompts_are_one_message_and_keep_their_order(generator: Generator, told: ToldScheduler) -> None:
    told.auto = lambda item: told.end(item.rid, bytes(item.tokens[::4]).decode().upper())
    groups = await generator.complete_many([ask("a"), ask("b")], n=2)
    assert [[one.text for one in group] for group in groups] == [["A", "A"], ["B", "B"]]
    assert [one.index for one in groups[1]] == [0, 1]
    assert len(told.got) == 1


async def test_stream_many_submits_at_once_and_streams_apart(generator: Generator, told: ToldScheduler) -> None:
    left, right = generator.stream_many([ask("l"), ask("r")])
    (message,) = told.got
    rids = [item.rid for item in message.items]
    told.end(rids[1], "right")
    assert (await anext(right)).text == "right"
    await left.aclose()
    assert told.aborted == [rids[0]]


async def test_closing_a_stream_aborts_it_once(generator: Generator, told: ToldScheduler) -> None:
    stream = generator.stream(ask(), n=2)
    first = asyncio.ensure_future(anext(stream))
    request = await arrived(told)
    told.say(request.rid, "x")
    await first
    await stream.aclose()
    await stream.aclose()
    assert sorted(told.aborted) == sorted([request.rid, request.rid[:-1] + "1"])
    assert generator.n_live == 0


async def test_a_dropped_stream_aborts(generator: Generator, told: ToldScheduler) -> None:
    told.auto = lambda item: told.say(item.rid, "x")
    async for _ in generator.stream(ask()):
        break
    gc.collect()
    assert len(told.aborted) == 1


async def test_a_cancelled_reader_aborts(generator: Generator, told: ToldScheduler) -> None:
    task = asyncio.ensure_future(generator.complete(ask()))
    request = await arrived(told)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told.aborted == [request.rid]


async def test_a_stream_never_started_reaches_nobody(generator: Generator, told: ToldScheduler) -> None:
    stream = generator.stream(ask())
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert told.got == []


async def test_an_abort_by_id_is_a_finish(generator: Generator, told: ToldScheduler) -> None:
    task = asyncio.ensure_future(generator.complete(ask()))
    request = await arrived(told)
    assert generator.abort(request.rid) == 1
    assert generator.abort("nobody") == 0
    told.end(request.rid, "", reason="abort")
    assert (await task)[0].finish.reason == "abort"


async def test_groups_are_aborted_together(generator: Generator, told: ToldScheduler) -> None:
    streams = generator.stream_many([ask("a", group="g"), ask("b", group="g"), ask("c", group="h")])
    assert generator.abort_group("g") == 2
    assert len(told.aborted) == 2
    assert generator.abort_all() == 3
    for stream in streams:
        stream.close()


async def test_a_live_id_cannot_be_used_twice(generator: Generator, told: ToldScheduler) -> None:
    (first,) = generator.stream_many([Submit(rid="mine", tokens=pack_ids([1]))])
    with pytest.raises(InvalidRequest, match="'mine' is in use") as caught:
        generator.stream_many([Submit(rid="mine", tokens=pack_ids([1]))])
    assert caught.value.param == "rid"
    told.end("mine")
    await anext(first)
    (again,) = generator.stream_many([Submit(rid="mine", tokens=pack_ids([1]))])
    again.close()


# -- text --------------------------------------------------------------------------------------------------------


async def texts(generator: Generator, told: ToldScheduler, params: SamplingParams, *pieces: str, **end: object) -> str:
    def answer(item: Submit) -> None:
        for piece in pieces[:-1]:
            told.say(item.rid, piece)
        told.say(item.rid, pieces[-1], **end)  # type: ignore[arg-type]

    told.auto = answer
    return "".join([delta.text async for delta in generator.stream(ask(params=params))])


async def test_a_stop_string_is_cut_over_token_borders(generator: Generator, told: ToldScheduler) -> None:
    end = {"finish": Finish(reason="stop", matched="\nUser:")}
    params = SamplingParams(stop=("\nUser:",))
    assert await texts(generator, told, params, "hi", "\nUs", "er", ":", **end) == "hi"
    keep = SamplingParams(stop=("\nUser:",), include_stop_str=True)
    assert await texts(generator, told, keep, "hi", "\nUs", "er", ":", **end) == "hi\nUser:"


async def test_what_only_looks_like_a_stop_is_given_back(generator: Generator, told: ToldScheduler) -> None:
    params = SamplingParams(stop=("\nUser:",))
    assert await texts(generator, told, params, "hi", "\nUs", finish=Finish(reason="length")) == "hi\nUs"


async def test_the_ending_token_is_not_text(generator: Generator, told: ToldScheduler) -> None:
    shown = SamplingParams(skip_special_tokens=False)
    assert await texts(generator, told, shown, "a", "b", eos=True, finish=Finish(reason="stop")) == "ab"
    matched = Finish(reason="stop", matched=ord("!"))
    assert await texts(generator, told, SamplingParams(stop_token_ids=(33,)), "a", "b!", finish=matched) == "ab"
    assert await texts(generator, told, SamplingParams(), '{"a":', "1}", finish=Finish(reason="stop")) == '{"a":1}'
    kept = SamplingParams(stop_token_ids=(33,), include_stop_str=True)
    assert await texts(generator, told, kept, "a", "b!", finish=matched) == "ab!"


async def test_half_a_character_waits_for_its_other_half(generator: Generator, told: ToldScheduler) -> None:
    stream = generator.stream(ask())
    first = asyncio.ensure_future(anext(stream))
    request = await arrived(told)
    half, other = (bytes([byte]) for byte in "é".encode())
    told.say(request.rid, half)
    assert (await first).text == ""
    told.say(request.rid, other)
    assert (await anext(stream)).text == "é"
    told.say(request.rid, half, finish=Finish(reason="length"))
    assert (await anext(stream)).text == "\ufffd"


async def test_segments_each_have_a_finish_and_rules_of_their_own(generator: Generator, told: ToldScheduler) -> None:
    def answer(item: Submit) -> None:
        told.say(item.rid, "one.", finish=Finish(reason="stop", matched="."), usage=None)
        told.say(item.rid, "two.", segment=1)
        told.say(item.rid, "!", segment=1, finish=Finish(reason="length"))

    told.auto = answer
    second = Segment(tokens=pack_ids([1]), params=SamplingParams())
    submit = ask(params=SamplingParams(stop=(".",)), segments=(second,))
    deltas = [delta async for delta in generator.stream(submit)]
    by_segment = ["".join(d.text for d in deltas if d.segment == i) for i in (0, 1)]
    assert by_segment == ["one", "two.!"]
    finishes = [(d.segment, d.finish.reason, d.usage is not None) for d in deltas if d.finish]
    assert finishes == [(0, "stop", False), (1, "length", True)]


async def test_logprobs_are_joined_in_order(generator: Generator, told: ToldScheduler) -> None:
    def answer(item: Submit) -> None:
        told.say(item.rid, "a", logprobs=(TokenLogprob(97, -0.5),), prompt_logprobs=(TokenLogprob(1, None),))
        told.say(item.rid, "b", logprobs=(TokenLogprob(98, -1.0),), finish=Finish(reason="length"))

    told.auto = answer
    (answer_,) = await generator.complete(ask())
    assert [one.token for one in answer_.logprobs or ()] == [97, 98]
    assert answer_.prompt_logprobs == (TokenLogprob(1, None),)


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("submit", "n", "param"),
    [
        (ask(""), 1, "prompt"),
        (Submit(rid="", tokens=pack_ids([257])), 1, "prompt"),
        (Submit(rid="", tokens=pack_ids([-1])), 1, "prompt"),
        (ask(params=SamplingParams(temperature=float("nan"))), 1, "temperature"),
        (ask(params=SamplingParams(top_p=0.0)), 1, "top_p"),
        (ask(params=SamplingParams(logit_bias={257: 1.0})), 1, "logit_bias"),
        (ask(), 0, "n"),
        (ask(), 129, "n"),
        (ask(), True, "n"),
    ],
)
async def test_what_is_wrong_is_told_before_queueing(
    generator: Generator, told: ToldScheduler, submit: Submit, n: int, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await anext(generator.stream(submit, n=n))
    assert caught.value.param == param
    assert told.got == []


async def test_a_prompt_over_the_context_names_both_numbers(generator: Generator) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"64 tokens.*65 tokens") as caught:
        await generator.complete(ask("x" * 65), param="messages")
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequest), (408, RequestTimeout), (429, QueueFull), (503, Unavailable), (500, RequestFailed)],
)
async def test_an_error_finish_is_raised_as_its_type(
    generator: Generator, told: ToldScheduler, status: int, kind: type[Exception]
) -> None:
    told.auto = lambda item: told.say(item.rid, finish=Finish(reason="error", status=status, message="because"))
    with pytest.raises(kind, match="because"):
        await generator.complete(ask())
    assert generator.n_live == 0


async def test_text_before_an_error_is_delivered_first(generator: Generator, told: ToldScheduler) -> None:
    def answer(item: Submit) -> None:
        told.say(item.rid, "so far")
        told.say(item.rid, finish=Finish(reason="error", message="step failed"), usage=None)

    told.auto = answer
    stream = generator.stream(ask())
    assert (await anext(stream)).text == "so far"
    with pytest.raises(RequestFailed, match="step failed"):
        await anext(stream)


async def test_one_failed_answer_aborts_its_siblings(generator: Generator, told: ToldScheduler) -> None:
    def answer(item: Submit) -> None:
        if item.rid.endswith(".1"):
            told.say(item.rid, finish=Finish(reason="error", message="no"))

    told.auto = answer
    with pytest.raises(RequestFailed):
        await generator.complete(ask(), n=3)
    assert sorted(rid[-2:] for rid in told.aborted if rid) == [".0", ".2"]


async def test_a_dying_scheduler_fails_everything_and_hangs_nothing(
    generator: Generator, client: LocalClient, told: ToldScheduler
) -> None:
    tasks = [asyncio.ensure_future(generator.complete(ask(), n=2)) for _ in range(3)]
    call = asyncio.ensure_future(generator.call("stats"))
    while len(told.got) < 4:
        await asyncio.sleep(0)
    told.die("out of luck")
    for task in [*tasks, call]:
        with pytest.raises(Unavailable, match="out of luck"):
            await asyncio.wait_for(task, 5)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="out of luck"):
        await generator.complete(ask())
    assert client.health()[:2] == (False, False)
    assert generator.n_live == 0


async def test_a_stalled_scheduler_is_not_ready(generator: Generator, client: LocalClient, told: ToldScheduler) -> None:
    assert client.health().ready
    told.last_turn -= 61
    assert client.health().ready  # idle: nothing to make progress on
    told.busy = True
    assert client.health()[:2] == (True, False)
    with pytest.raises(Unavailable, match="no progress for 61 s"):
        await generator.complete(ask())


async def test_a_draining_generator_takes_nothing_new_and_finishes_the_rest(
    generator: Generator, told: ToldScheduler
) -> None:
    task = asyncio.ensure_future(generator.complete(ask()))
    request = await arrived(told)
    generator.begin_drain()
    with pytest.raises(Unavailable, match="shutting down"):
        await generator.complete(ask())
    told.end(request.rid, "done")
    assert (await task)[0].text == "done"
    assert generator.health()[:2] == (True, False)


async def test_calls_are_answered_refused_and_matched(generator: Generator, told: ToldScheduler) -> None:
    first = asyncio.ensure_future(generator.call("stats"))
    second = asyncio.ensure_future(generator.call("flush"))
    calls = [await arrived(told), await arrived(told)]
    told.reply(calls[1].id, error="2 requests are running")
    told.reply(calls[0].id, value={"running": 2})
    assert await first == {"running": 2}
    with pytest.raises(InvalidRequest, match="are running"):
        await second


def test_streams_of_different_loops_do_not_meet(generator: Generator, told: ToldScheduler) -> None:
    told.auto = lambda item: told.end(item.rid, "ok")
    for _ in range(2):
        answers = asyncio.run(generator.complete(ask()))
        assert answers[0].text == "ok"
