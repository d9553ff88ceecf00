"""Those of the nine programs that SGLang's frontend can express, against our server. Needs `sglang` installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from bench.program_shapes import DOCUMENT, QUESTIONS, RULES, SHOTS, TICKETS, TOKENS


def available() -> bool:
    return importlib.util.find_spec("sglang") is not None


def programs(url: str) -> dict[str, Callable[[], Any]]:
    """Name of the shape -> a function that runs it to the end."""
    import sglang.lang.api as sgl  # the frontend alone: the runtime of sglang needs a GPU
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    backend = RuntimeEndpoint(url)

    @sgl.function
    def few_shot(s: Any, question: str) -> None:
        s += f"{RULES}{SHOTS}Question: {question}\nAnswer:" + sgl.gen("answer", max_tokens=TOKENS, ignore_eos=True)

    @sgl.function
    def chain(s: Any) -> None:
        s += RULES + DOCUMENT
        for i in range(5):
            s += f"\nQuestion {i}: what is the text about?\nAnswer:"
            s += sgl.gen(f"a{i}", max_tokens=TOKENS, ignore_eos=True)

    @sgl.function
    def self_consistency(s: Any) -> None:
        s += RULES + DOCUMENT + "How old is the mill?"
        for sample in s.fork(8):
            sample += sgl.gen("answer", max_tokens=TOKENS, ignore_eos=True, temperature=0.8)

    @sgl.function
    def tree_of_thought(s: Any) -> None:
        s += RULES + DOCUMENT + "What should the town do with the mill next?"
        for thought in s.fork(3):
            thought += sgl.gen("step", max_tokens=TOKENS, ignore_eos=True, temperature=0.8)
            for leaf in thought.fork(3):
                leaf += "Go on." + sgl.gen("step", max_tokens=TOKENS, ignore_eos=True, temperature=0.8)

    @sgl.function
    def judge(s: Any) -> None:
        s += RULES + DOCUMENT
        for i, duel in enumerate(s.fork(6)):
            duel += f"A: It is {i} years old.\nB: It was built in 1821.\nWhich is right, A or B? It is "
            duel += sgl.select("winner", ["A", "B"])

    @sgl.function
    def extraction(s: Any, text: str) -> None:
        s += f"{RULES}Fill in the form.\n{text}\nForm: "
        s += sgl.gen("form", max_tokens=40, regex=r'\{"order": [0-9]{1,6}, "urgent": (true|false)\}')

    def single(program: Any) -> Callable[[], Any]:
        return lambda: program.run(backend=backend, temperature=0).sync()

    def batch(program: Any, key: str, values: tuple[str, ...]) -> Callable[[], Any]:
        return lambda: program.run_batch([{key: value} for value in values], backend=backend, temperature=0)

    return {
        "few-shot batch": batch(few_shot, "question", QUESTIONS),
        "chain": single(chain),
        "self-consistency": single(self_consistency),
        "tree of thought": single(tree_of_thought),
        "judge with select": single(judge),
        "JSON extraction": batch(extraction, "text", TICKETS),
    }
