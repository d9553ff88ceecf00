"""The nine programs as a good client writes them by hand: OpenAI calls, side by side wherever nothing waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from bench.program_shapes import CHUNKS, DOCUMENT, EXACT, QUESTIONS, RULES, SCHEMA, SHOTS, TICKETS, look_up


class Client:
    """An OpenAI client that adds up what the server says it cost."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=f"{url}/v1", timeout=None, limits=limits)
        self.requests = self.prompt = self.cached = self.generated = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def chat(self, messages: list[dict[str, str]], **options: Any) -> Any:
        return (await self._post("/chat/completions", {"messages": messages, **options}))["choices"][0]

    async def text(self, prompt: str, **options: Any) -> str:
        body = await self._post("/completions", {"prompt": prompt, **options})
        return str(body["choices"][0]["text"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = await self._http.post(path, json={"temperature": 0, **body})
        reply.raise_for_status()
        answer = reply.json()
        usage = answer["usage"]
        self.requests += 1
        self.prompt += usage["prompt_tokens"]
        self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.generated += usage["completion_tokens"]
        return answer


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def said(choice: Any) -> dict[str, str]:
    return message("assistant", choice["message"]["content"] or "")


async def few_shot(client: Client) -> None:
    await asyncio.gather(
        *(client.text(f"{RULES}{SHOTS}Question: {question}\nAnswer:", **EXACT) for question in QUESTIONS)
    )


async def chain(client: Client) -> None:
    text = RULES + DOCUMENT
    for i in range(5):
        text += f"\nQuestion {i}: what is the text about?\nAnswer:"
        text += await client.text(text, **EXACT)


async def self_consistency(client: Client) -> None:
    messages = [message("system", RULES), message("user", DOCUMENT + "How old is the mill?")]
    await asyncio.gather(*(client.chat(messages, **{**EXACT, "temperature": 0.8, "seed": i}) for i in range(8)))


async def tree_of_thought(client: Client) -> None:
    async def grow(messages: list[dict[str, str]], depth: int, seed: int) -> None:
        async def one(i: int) -> None:
            choice = await client.chat(messages, **{**EXACT, "temperature": 0.8, "seed": 3 * seed + i})
            if depth > 1:
                await grow([*messages, said(choice), message("user", "Go on.")], depth - 1, 3 * seed + i + 1)

        await asyncio.gather(*(one(i) for i in range(3)))

    question = DOCUMENT + "What should the town do with the mill next?"
    await grow([message("system", RULES), message("user", question)], 2, 0)


async def multi_turn(client: Client) -> None:
    messages = [message("system", RULES), message("user", DOCUMENT)]
    for i in range(5):
        messages += [said(await client.chat(messages, **EXACT)), message("user", f"And what about point {i}?")]


async def tool_loop(client: Client) -> None:
    shape = {"name": "call", "strict": True, "schema": look_up.schema}
    messages = [message("system", RULES + "Tool: " + look_up.describe)]
    for i in range(3):
        messages.append(message("user", f"Where is my order {4400 + i}?"))
        wanted = {"type": "json_schema", "json_schema": shape}
        call = said(await client.chat(messages, max_tokens=24, response_format=wanted))
        try:
            result = look_up(**json.loads(call["content"]))
        except ValueError:
            result = "error: no valid call"
        messages += [call, message("user", result)]
        messages.append(said(await client.chat(messages, **EXACT)))


async def map_reduce(client: Client) -> None:
    async def one(chunk: str) -> str:
        answer = await client.chat([message("system", RULES), message("user", f"Sum this up: {chunk}")], **EXACT)
        return str(answer["message"]["content"])

    parts = await asyncio.gather(*map(one, CHUNKS))
    together = message("user", "Sum up these summaries:\n" + "\n".join(parts))
    await client.chat([message("system", RULES), together], **EXACT)


async def judge(client: Client) -> None:
    async def one(i: int) -> None:
        question = f"A: It is {i} years old.\nB: It was built in 1821.\nWhich is right, A or B?"
        messages = [message("system", RULES), message("user", DOCUMENT), message("user", question)]
        await client.chat(messages, max_tokens=1, logprobs=True, top_logprobs=20)

    await asyncio.gather(*(one(i) for i in range(6)))


async def extraction(client: Client) -> None:
    system = RULES + "Fill in the form as JSON: order (a number) and urgent (true or false)."
    shape = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": SCHEMA}}
    await asyncio.gather(
        *(
            client.chat([message("system", system), message("user", text)], max_tokens=40, response_format=shape)
            for text in TICKETS
        )
    )


CALLS: dict[str, Callable[[Client], Coroutine[Any, Any, None]]] = {
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
