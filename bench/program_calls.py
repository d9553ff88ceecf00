"""The nine programs as one writes them by hand with the OpenAI SDK: one call after another, or side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from openai import AsyncOpenAI

from bench.program_shapes import look_up
from bench.program_texts import DOCUMENT, FIELDS, FORM, RULES, SCHEMA, SHOTS, Sizes, chunks, duel, questions, tickets

T = TypeVar("T")
Messages = list[dict[str, str]]


class Client:
    """An OpenAI client that adds up what the server says it cost. `side_by_side`: calls that wait for nothing overlap.

    `seen` keeps what was asked and answered, in the order of asking, to be counted afterwards.
    """

    def __init__(self, url: str, model: str, *, side_by_side: bool) -> None:
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self._model = model
        self._side_by_side = side_by_side
        self.requests = self.prompt = self.cached = self.generated = 0
        self.seen: list[list[Any]] = []  # [messages or text, answer]

    async def close(self) -> None:
        await self._openai.close()

    async def all(self, work: Iterable[Awaitable[T]]) -> list[T]:
        """The results of calls that do not wait for each other."""
        if self._side_by_side:
            return list(await asyncio.gather(*work))
        return [await one for one in work]

    async def chat(self, messages: Messages, **options: Any) -> str:
        place = self._asked(messages)
        create: Any = self._openai.chat.completions.create  # our options are no literals
        answer = await create(model=self._model, messages=messages, **_split(options))
        place[1] = answer.choices[0].message.content or ""
        self._count(answer.usage)
        return str(place[1])

    async def text(self, prompt: str, **options: Any) -> str:
        place = self._asked(prompt)
        create: Any = self._openai.completions.create
        answer = await create(model=self._model, prompt=prompt, **_split(options))
        place[1] = answer.choices[0].text
        self._count(answer.usage)
        return str(place[1])

    def _asked(self, prompt: Any) -> list[Any]:
        self.seen.append([list(prompt) if isinstance(prompt, list) else prompt, ""])
        return self.seen[-1]

    def _count(self, usage: Any) -> None:
        details = usage.prompt_tokens_details
        self.requests += 1
        self.prompt += usage.prompt_tokens
        self.cached += (details.cached_tokens or 0) if details else 0
        self.generated += usage.completion_tokens


def _split(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the SDK: what OpenAI does not know goes into the body as it is."""
    known = {key: value for key, value in options.items() if key != "ignore_eos"}
    if "ignore_eos" in options:
        known["extra_body"] = {"ignore_eos": True}
    return {"temperature": 0, **known}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def few_shot(client: Client, size: Sizes) -> None:
    await client.all(
        client.text(f"{RULES}{SHOTS}Question: {question}\nAnswer:", **size.exact)
        for question in questions(size.questions)
    )


async def chain(client: Client, size: Sizes) -> None:
    text = RULES + DOCUMENT + "\nA person in this story, as a form:"
    for field in FIELDS[: size.fields]:
        text += f"\n{field}:"
        text += await client.text(text, **size.exact)


async def self_consistency(client: Client, size: Sizes) -> None:
    messages = [message("system", RULES), message("user", DOCUMENT + "How old is the mill?")]
    hot = {**size.exact, "temperature": 0.8}
    await client.all(client.chat(messages, **hot, seed=i) for i in range(size.samples))


async def tree_of_thought(client: Client, size: Sizes) -> None:
    hot = {**size.exact, "temperature": 0.8}

    async def grow(messages: Messages, depth: int, seed: int) -> None:
        async def one(i: int) -> None:
            said = await client.chat(messages, **hot, seed=size.width * seed + i)
            if depth > 1:
                after = [*messages, message("assistant", said), message("user", "Go on.")]
                await grow(after, depth - 1, size.width * seed + i + 1)

        await client.all(one(i) for i in range(size.width))

    question = DOCUMENT + "What should the town do with the mill next?"
    await grow([message("system", RULES), message("user", question)], size.depth, 0)


async def multi_turn(client: Client, size: Sizes) -> None:
    messages = [message("system", RULES), message("user", DOCUMENT)]
    for i in range(size.turns):
        said = await client.chat(messages, **size.long)
        messages += [message("assistant", said), message("user", f"And what about point {i}? You said: {said[:10]}")]


async def tool_loop(client: Client, size: Sizes) -> None:
    shape = {"name": "call", "strict": True, "schema": look_up.schema}
    messages = [message("system", RULES + "Tool: " + look_up.describe)]
    for i in range(size.calls):
        messages.append(message("user", f"Where is my order {4400 + i}?"))
        wanted = {"type": "json_schema", "json_schema": shape}
        call = await client.chat(messages, max_tokens=24, response_format=wanted)
        try:
            result = look_up(**json.loads(call))
        except ValueError:
            result = "error: no valid call"
        messages += [message("assistant", call), message("tool", result)]
        messages.append(message("assistant", await client.chat(messages, **size.long)))


async def map_reduce(client: Client, size: Sizes) -> None:
    def one(chunk: str) -> Awaitable[str]:
        return client.chat([message("system", RULES), message("user", f"Sum this up: {chunk}")], **size.long)

    parts = await client.all(one(chunk) for chunk in chunks(size.chunks))
    together = message("user", "Sum up these summaries:\n" + "\n".join(parts))
    await client.chat([message("system", RULES), together], **size.long)


async def judge(client: Client, size: Sizes) -> None:
    """By hand one has the judge write a letter and reads the odds from its alternatives."""

    def one(i: int) -> Awaitable[str]:
        messages = [message("system", RULES), message("user", DOCUMENT), message("user", duel(i))]
        return client.chat(messages, max_tokens=1, logprobs=True, top_logprobs=20)

    await client.all(one(i) for i in range(size.duels))


async def extraction(client: Client, size: Sizes) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": SCHEMA}}
    await client.all(
        client.chat([message("system", RULES + FORM), message("user", text)], max_tokens=40, response_format=shape)
        for text in tickets(size.tickets)
    )


CALLS: dict[str, Callable[[Client, Sizes], Coroutine[Any, Any, None]]] = {
    "few-shot batch": few_shot,
    "chain": chain,
    "self-consistency": self_consistency,
    "tree of thought": tree_of_thought,
    "multi-turn": multi_turn,
    "tool loop": tool_loop,
    "map-reduce": map_reduce,
    "judge with select": judge,
    "JSON extraction": extraction,
}
