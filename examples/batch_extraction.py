"""Batch extraction: many texts to typed objects. The instructions are prefilled once for all of them.

python examples/batch_extraction.py
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from report import show_totals
from rich.console import Console
from rich.table import Table

import ramet as rt

TEXTS = [
    "Hi, my order 4417 arrived today but the blue lamp is broken. Please send a new one. Maria",
    "Hello! When do you open on Sunday? Thanks, John",
    "I was charged twice for order 9023. I want my money back. Peter",
    "The chair from order 3310 is wonderful, thank you so much! Lena",
    "Can I change the address of order 5128? I have moved. Best, Omar",
    "My parcel, order 7702, has been on its way for three weeks. Where is it? Sofia",
]


class Ticket(BaseModel):
    """What a shop must know of a customer's message."""

    customer: str = Field(max_length=20)
    order: int | None
    topic: Literal["damage", "delivery", "payment", "praise", "question"]
    urgent: bool


@rt.function
def extract(s: rt.State, text: str) -> Ticket:
    s.system(
        "You read messages of customers and fill in a form as JSON: customer (the first name), order (the number, "
        "or null), topic (damage, delivery, payment, praise or question) and urgent (true or false)."
    )
    s.user("My order 1234 never came! I need it now. Carl")
    s.assistant('{"customer": "Carl", "order": 1234, "topic": "delivery", "urgent": true}')
    s.user(text)
    s.assistant(rt.gen("ticket", Ticket, max_tokens=80))
    return s["ticket"]


def main() -> None:
    console = Console()
    with rt.Engine() as engine:
        batch = extract.run_batch(engine, TEXTS, on_error="return")
    table = Table("message", "customer", "order", "topic", "urgent")
    for text, result in zip(TEXTS, batch, strict=True):
        if isinstance(result, Exception):
            table.add_row(text, f"[red]{type(result).__name__}[/]")
        else:
            ticket = result.value
            table.add_row(text, ticket.customer, str(ticket.order), ticket.topic, "yes" if ticket.urgent else "no")
    console.print(table)
    show_totals(console, {"batch": batch.totals})


if __name__ == "__main__":
    main()
