"""`token_ids_logprob`: how likely the model finds these very tokens, at every place of prompt and answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.engine import Engine
from runtime.serve.app import create_app
from tests.lang.engines import toy_engine
from tests.serve.scripted import Pool, data_events

IDS = [1, 70, 200]
PROMPT = list(b"one two three")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with toy_engine() as engine:
        yield engine


async def generate(engine: Engine, **body: Any) -> httpx.Response:
    app = create_app(engine.generator, engine.config, ServerConfig(), pool=Pool())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://ramet", timeout=30) as http:
        return await http.post("/generate", json=body)


def asked(**more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    return {"sampling_params": sampling, "return_logprob": True, "token_ids_logprob": IDS, **more}


def score(engine: Engine, before: list[int], token: int) -> float:
    """The token's log-probability after `before`, by itself."""
    alone = engine.generate([*before, token], max_tokens=0, logprobs=True, prompt_logprobs_from=len(before))
    return alone.prompt_logprobs[0].logprob


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start", [0, 5, -1])
async def test_each_place_tells_what_the_token_would_have_scored_there(engine, stream, start):
    response = await generate(engine, input_ids=PROMPT, logprob_start_len=start, stream=stream, **asked())
    answer = json.loads(data_events(response.text)[-2]) if stream else response.json()
    meta, said = answer["meta_info"], answer["output_ids"]
    first = len(PROMPT) if start < 0 else start
    places = [*meta["input_token_ids_logprobs"], *meta["output_token_ids_logprobs"]]
    assert len(places) == len(PROMPT) - first + len(said)
    for place, told in enumerate(places, first):
        if place == 0:
            assert told is None
            continue
        before = [*PROMPT, *said][:place]
        expected = [[await asyncio.to_thread(score, engine, before, token), token, None] for token in IDS]
        assert told == expected


async def test_each_prompt_of_a_batch_may_have_ids_of_its_own(engine):
    body = asked(input_ids=[PROMPT, PROMPT, PROMPT], token_ids_logprob=[[1], None, [70, 200]])
    answers = (await generate(engine, **body)).json()
    told = [answer["meta_info"].get("output_token_ids_logprobs") for answer in answers]
    assert told[1] is None
    assert [[triple[1] for triple in place] for place in told[0]] == [[1]] * 4
    assert [[triple[1] for triple in place] for place in told[2]] == [[70, 200]] * 4
    same = [[triple[0] for triple in place] for place in told[0]]
    alone = (await generate(engine, **asked(input_ids=PROMPT, token_ids_logprob=[1]))).json()
    assert same == [[t[0] for t in place] for place in alone["meta_info"]["output_token_ids_logprobs"]]


async def test_forced_tokens_are_told_of_too(engine):
    sampling = {"max_new_tokens": 20, "regex": "always the same words[0-9]"}
    answer = (await generate(engine, input_ids=PROMPT, **asked(sampling_params=sampling))).json()
    meta = answer["meta_info"]
    assert answer["text"].startswith("always the same wor")
    assert len(meta["output_token_ids_logprobs"]) == len(answer["output_ids"]) == meta["completion_tokens"]
    place = 7
    before = [*PROMPT, *answer["output_ids"][:place]]
    expected = [await asyncio.to_thread(score, engine, before, token) for token in IDS]
    assert [triple[0] for triple in meta["output_token_ids_logprobs"][place]] == expected


@pytest.mark.parametrize(
    "wrong", [[1, [2]], [10**6], [-1], ["x"], list(range(300)), [[1], [2], [3]], {"1": 1}, [1.5], [10**30]]
)
async def test_ids_that_make_no_sense_are_refused(engine, wrong):
    response = await generate(engine, input_ids=[PROMPT, PROMPT], **asked(token_ids_logprob=wrong))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("token_ids_logprob")


async def test_without_return_logprob_the_ids_are_left_aside(engine):
    response = await generate(engine, input_ids=PROMPT, **asked(return_logprob=False))
    assert response.status_code == 200
    assert "output_token_ids_logprobs" not in response.json()["meta_info"]
