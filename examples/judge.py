"""A judge: answers are compared in pairs by log-probability, in both orders, so that no place has an advantage.

python examples/judge.py
"""

from __future__ import annotations

import itertools
import math

from report import show_totals
from rich.console import Console
from rich.table import Table

import ramet as rt

QUESTION = "How do I keep bread fresh for longer?"
ANSWERS = [
    "Keep it in a bread box or a paper bag at room temperature, and freeze what you will not eat within two days.",
    "Bread is made from flour, water and yeast.",
    "Put it in the fridge, where it will get hard more quickly.",
    "Wrap it in a clean cloth, cut side down, away from heat.",
]


@rt.function
def judge(s: rt.State, question: str, answers: list[str]) -> list[float]:
    """Each answer's share of the duels it won, from 0 to 1."""
    s.system("You are a fair judge. You compare two answers to a question and say which one is more helpful: A or B.")
    s.user(f"The question: {question}")
    pairs = list(itertools.permutations(range(len(answers)), 2))
    with s.fork(len(pairs)) as duels:
        for duel, (first, second) in zip(duels, pairs, strict=True):
            duel.user(f"A: {answers[first]}\nB: {answers[second]}\nWhich answer is more helpful?")
            duel.assistant("The more helpful answer is ", rt.select("winner", ["A", "B"]))
        wins = [0.0] * len(answers)
        for duel, (first, second) in zip(duels, pairs, strict=True):
            scores = duel.info("winner").scores or {}
            odds = 1 / (1 + math.exp(scores["B"] - scores["A"]))  # the judge's own certainty, not just its word
            wins[first] += odds
            wins[second] += 1 - odds
    return [win / (2 * (len(answers) - 1)) for win in wins]


def main() -> None:
    console = Console()
    with rt.Engine() as engine:
        result = judge.run(engine, question=QUESTION, answers=ANSWERS)
    table = Table("won", "answer", title=QUESTION)
    for share, answer in sorted(zip(result.value, ANSWERS, strict=True), reverse=True):
        table.add_row(f"{share:.0%}", answer)
    console.print(table)
    show_totals(console, {"judge": result.totals})


if __name__ == "__main__":
    main()
