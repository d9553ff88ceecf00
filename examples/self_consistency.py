"""Self-consistency: sample many answers to one question from one prefix, and let them vote.

python examples/self_consistency.py
"""

from __future__ import annotations

from collections import Counter

from report import show_totals
from rich.console import Console

import ramet as rt

QUESTION = "Anna has 3 apples and buys 4 more. She gives 2 to Ben. How many apples has Anna now?"


@rt.function
def vote(s: rt.State, question: str, n: int = 8) -> Counter[int]:
    """How often each number was the answer."""
    s.system("You reason in one or two short sentences and then give the answer as a number.")
    s.user("Tom has 5 pens and loses 1. How many pens has he now?")
    s.assistant("Tom had 5 pens and lost 1, so 5 - 1 = 4. The answer is 4")
    s.user(question)
    with s.fork(n) as samples:
        for sample in samples:
            with sample.assistant():
                sample += rt.gen("why", max_tokens=32, temperature=0.8, stop=["The answer", "\n"])
                sample += "The answer is"
                sample += rt.gen("answer", int, max_tokens=4, temperature=0.0)
        return Counter(samples.values("answer"))


def main() -> None:
    console = Console()
    with rt.Engine() as engine:
        result = vote.run(engine, question=QUESTION, seed=1)
    console.print(f"[bold]{QUESTION}[/]")
    for number, count in result.value.most_common():
        console.print(f"{number:>6} {'█' * count} {count}")
    show_totals(console, {"self-consistency": result.totals})


if __name__ == "__main__":
    main()
