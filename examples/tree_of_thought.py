"""Tree of thought: propose steps, score each by the odds of a good verdict, go on from the best. One shared prefix.

python examples/tree_of_thought.py
"""

from __future__ import annotations

from typing import Any

from report import show_totals
from rich.console import Console
from rich.tree import Tree

import ramet as rt

TASK = "Plan a birthday party for ten children in a small garden, with little money and a chance of rain."


@rt.function
def tree_of_thought(s: rt.State, task: str, width: int = 3, depth: int = 2) -> list[str]:
    """The best chain of steps."""
    s.system("You solve a task step by step. Every step is one short sentence that builds on the steps before it.")
    s.user(f"The task: {task}")
    best, chain = s, []
    for level in range(depth):
        thoughts = best.fork(width)
        judges = []
        for thought in thoughts:
            thought.user(f"Give step {level + 1}.")
            thought.assistant(rt.gen("step", max_tokens=20, stop=[".", "\n"], temperature=0.9), ".")
            judge = thought.fork(["judge"])[0]  # the verdict must not stand in the chain of thought
            judge.user("Is this step useful? Answer Yes or No.")
            judge.assistant(rt.select("useful", ["Yes", "No"]))
            judges.append(judge)
        odds = [judge.info("useful").scores["Yes"] for judge in judges]
        best = thoughts[odds.index(max(odds))]
        chain.append(f"{best.name}: {best['step'].strip()}")
    return chain


def show(console: Console, result: rt.Result[Any]) -> None:
    """All thoughts as a tree."""
    nodes: dict[str | None, Tree] = {None: Tree("thoughts")}
    for name, (parent, spans) in result.record.branches.items():
        thought = next((span.text.strip() for span in spans if span.name == "step"), "")
        if not name.endswith("judge"):
            nodes[name] = nodes[parent].add(f"[bold]{name}[/] {thought}")
    console.print(nodes[None])


def main() -> None:
    console = Console()
    with rt.Engine() as engine:
        result = tree_of_thought.run(engine, task=TASK)
    show(console, result)
    console.print("best:", " → ".join(result.value))
    show_totals(console, {"tree of thought": result.totals})


if __name__ == "__main__":
    main()
