"""Those of the nine programs that SGLang's frontend can express, run by it, unmodified, against our server.

    python -m bench.program_sglang URL     (by an interpreter that has `sglang`; needs nothing of Ramet)

Reads names of shapes from its input, a line each, and answers each with a line of JSON: seconds, and the texts it
asked about with their answers, as [prompt, answer].
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.program_texts import DOCUMENT, FIELDS, FORM, FULL, RULES, SHOTS, SMALL, Sizes, duel, questions, tickets

EXPRESSIBLE = (
    "few-shot batch",
    "chain",
    "self-consistency",
    "tree of thought",
    "multi-turn",
    "map-reduce",
    "judge with select",
    "JSON extraction",
)


def programs(url: str, size: Sizes) -> dict[str, Callable[[], Any]]:
    """Name of the shape -> a function that runs it to the end."""
    import sglang.lang.api as sgl
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    backend = RuntimeEndpoint(url, chat_template_name="chatml")  # the template of the model we serve
    exact: dict[str, Any] = size.exact
    chat = {"system": sgl.system, "user": sgl.user, "assistant": sgl.assistant}

    @sgl.function
    def few_shot(s: Any, question: str) -> None:
        s += f"{RULES}{SHOTS}Question: {question}\nAnswer:" + sgl.gen("answer", **exact)

    @sgl.function
    def chain(s: Any) -> None:
        s += RULES + DOCUMENT + "\nA person in this story, as a form:"
        for field in FIELDS[: size.fields]:
            s += f"\n{field}:" + sgl.gen(field, **exact)

    @sgl.function
    def self_consistency(s: Any) -> None:
        s += chat["system"](RULES) + chat["user"](DOCUMENT + "How old is the mill?")
        samples = s.fork(size.samples)
        samples += chat["assistant"](sgl.gen("answer", temperature=0.8, **exact))
        samples.join()

    @sgl.function
    def tree_of_thought(s: Any) -> None:
        s += chat["system"](RULES) + chat["user"](DOCUMENT + "What should the town do with the mill next?")
        _grow(s, size.depth)

    def _grow(s: Any, depth: int) -> None:
        thoughts = s.fork(size.width)
        thoughts += chat["assistant"](sgl.gen("step", temperature=0.8, **exact))
        if depth > 1:
            thoughts += chat["user"]("Go on.")
            for thought in thoughts:
                _grow(thought, depth - 1)
        thoughts.join()

    @sgl.function
    def multi_turn(s: Any) -> None:
        s += chat["system"](RULES) + chat["user"](DOCUMENT)
        for i in range(size.turns):
            s += chat["assistant"](sgl.gen(f"a{i}", **size.long))
            s += chat["user"](f"And what about point {i}? You said: {s[f'a{i}'][:10]}")

    @sgl.function
    def map_reduce(s: Any) -> None:
        s += chat["system"](RULES)
        parts = s.fork(size.chunks)
        for i, part in enumerate(parts):
            part += chat["user"](f"Sum this up: Part {i}. {DOCUMENT}")
        parts += chat["assistant"](sgl.gen("summary", **size.long))
        s += chat["user"]("Sum up these summaries:\n" + "\n".join(part["summary"] for part in parts))
        s += chat["assistant"](sgl.gen("all", **size.long))

    @sgl.function
    def judge(s: Any) -> None:
        s += chat["system"](RULES) + chat["user"](DOCUMENT)
        duels = s.fork(size.duels)
        for i, one in enumerate(duels):
            one += chat["user"](duel(i))
        duels += chat["assistant"](sgl.select("winner", ["A", "B"]))
        duels.join()

    @sgl.function
    def extraction(s: Any, text: str) -> None:
        s += chat["system"](RULES + FORM) + chat["user"](text)
        s += chat["assistant"](sgl.gen("form", max_tokens=40, regex=r'\{"order": [0-9]{1,6}, "urgent": (true|false)\}'))

    def single(program: Any) -> Callable[[], Any]:
        return lambda: program.run(backend=backend, temperature=0).sync()

    def batch(program: Any, key: str, values: list[str]) -> Callable[[], Any]:
        return lambda: program.run_batch([{key: value} for value in values], backend=backend, temperature=0)

    return {
        "few-shot batch": batch(few_shot, "question", questions(size.questions)),
        "chain": single(chain),
        "self-consistency": single(self_consistency),
        "tree of thought": single(tree_of_thought),
        "multi-turn": single(multi_turn),
        "map-reduce": single(map_reduce),
        "judge with select": single(judge),
        "JSON extraction": batch(extraction, "text", tickets(size.tickets)),
    }


def listen() -> list[list[str]]:
    """A list that fills with [prompt, answer] of every request the frontend makes from now on."""
    from sglang.lang.backend import runtime_endpoint

    seen: list[list[str]] = []
    send = runtime_endpoint.http_request

    def heard(url: str, json: Any = None, **options: Any) -> Any:
        texts = json.get("text") if isinstance(json, dict) and url.endswith("/generate") else None
        asked = [texts] if isinstance(texts, str) else list(texts or ())
        places = [[text, ""] for text in asked]
        seen.extend(places)
        reply = send(url, json=json, **options)
        if asked and not json.get("stream"):
            body = reply.json()
            for place, answer in zip(places, body if isinstance(body, list) else [body], strict=True):
                place[1] = answer.get("text") or ""
        return reply

    runtime_endpoint.http_request = heard
    return seen


def main() -> None:
    url, small = sys.argv[1], "--small" in sys.argv
    seen = listen()
    runs = programs(url, SMALL if small else FULL)
    print(json.dumps(list(runs)), flush=True)
    for line in sys.stdin:
        seen.clear()
        began = time.perf_counter()
        runs[line.strip()]()
        print(json.dumps({"wall_s": time.perf_counter() - began, "seen": seen}), flush=True)


if __name__ == "__main__":
    main()
