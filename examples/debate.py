"""A debate: three agents with minds of their own read one document, speak in turn, and a chair sums up.

    python examples/debate.py

The document is prefilled once. Every agent is a branch that keeps its own conversation; what one says reaches the
others as text.
"""

from __future__ import annotations

from report import show_totals
from rich.console import Console

import ramet as rt

DOCUMENT = """The town council plans to close Mill Street to cars from next spring. The street has eleven shops, a
school with two hundred pupils and a bus stop. Last year there were nine accidents on it, two of them with children. A
count in June found four thousand cars a day, of which six in ten only pass through. The shops fear for their
customers; three of them have written to the mayor. Parents have collected eight hundred signatures for the plan. The
bus company asks for a lane of its own. Closing the street would cost ninety thousand, most of it for
benches, trees and signs, and the state would pay half. The nearest other road, Canal Road, is already full in the
morning. The council votes in October."""
AGENTS = {
    "shopkeeper": "You own a shop on Mill Street and worry about your customers.",
    "parent": "Your children go to the school on Mill Street and you worry about accidents.",
    "driver": "You drive through Mill Street to work every day.",
}


@rt.function
def debate(s: rt.State, document: str, rounds: int = 2) -> list[tuple[str, str]]:
    """Who said what, in order; the chair's summary is the variable `summary`."""
    s.system("You take part in a debate about a document. You speak in one or two short sentences.")
    s.user(f"The document:\n{document}")
    said: list[tuple[str, str]] = []
    with s.fork(list(AGENTS)) as agents:
        for agent, (name, role) in zip(agents, AGENTS.items(), strict=True):
            agent.user(f"You are the {name}. {role}")
        for _ in range(rounds):
            heard = "\n".join(f"The {name} said: {words}" for name, words in said[-3:])
            for agent in agents:
                agent.user(f"{heard}\nWhat do you say?".strip())
                agent.assistant(rt.gen("words", max_tokens=40, stop="\n", temperature=0.7))
            words = agents.values("words")  # all three speak at the same time
            said += [(name, text.strip()) for name, text in zip(AGENTS, words, strict=True)]
    s.user("The debate:\n" + "\n".join(f"{name}: {words}" for name, words in said) + "\nSum it up in one sentence.")
    s.assistant(rt.gen("summary", max_tokens=40, stop="\n"))
    return said


def main() -> None:
    console = Console()
    with rt.Engine() as engine:
        result = debate.run(engine, document=DOCUMENT)
    for name, words in result.value:
        console.print(f"[bold]{name}[/]: {words}")
    console.print(f"[bold cyan]chair[/]: {result['summary'].strip()}")
    show_totals(console, {"debate": result.totals})


if __name__ == "__main__":
    main()
