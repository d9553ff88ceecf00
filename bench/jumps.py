"""The jump-forward fixture: random flat objects, written by a model that always continues canonically.

    python -m bench.jumps

Counts, rather than times: how many objects come out in the tokenizer's own tokens, and how many model steps they take.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from runtime.grammar.backends import Llguidance, Xgrammar
from runtime.grammar.limits import Limits
from runtime.grammar.pieces import Pieces
from runtime.grammar.prepare import prepare
from runtime.grammar.protocol import forced_run
from runtime.grammar.service import vocabulary
from runtime.messages import GrammarSpec
from runtime.pull import embedded_path
from runtime.text.tokenizer import Tokenizer

WORDS = [
    "name", "city", "first_name", "population", "user_id", "créé", "tags", "is_active", "日付", "zip-code", "price",
]  # fmt: skip
VALUES = ["Ann", "San José", "a b", "", "x1", "New York City", "😀", "don't", "C:/tmp"]


def flat_objects(n: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Schemas of 2 to 6 fixed keys, each with an instance."""
    chooser = random.Random(7)
    made = []
    for _ in range(n):
        keys = chooser.sample(WORDS, chooser.randint(2, 6))
        value = {k: chooser.choice(VALUES) if chooser.random() < 0.6 else chooser.randint(0, 999) for k in keys}
        types = {k: {"type": "string" if isinstance(v, str) else "integer"} for k, v in value.items()}
        made.append(({"type": "object", "properties": types, "required": keys}, value))
    return made


def follow(
    cursor: Any, text: str, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes], *, jump: bool
) -> tuple[list[int], int]:
    """Generate `text` as a model would that always continues canonically. Returns the ids and the model's steps."""
    ids: list[int] = []
    steps, data = 0, text.encode()
    boundaries, done = {}, 0
    for token in encode(text):
        boundaries[done] = token
        done += len(token_bytes[token])
    at = 0
    while at < len(data):
        run = list(forced_run(cursor, 64)) if jump else []
        if not run:
            token = boundaries.get(at) or encode(data[at:].decode())[0]
            assert cursor.accept(token)
            run, steps = [token], steps + 1
        ids += run
        at += sum(len(token_bytes[t]) for t in run)
    assert cursor.can_stop
    return ids, steps


def main() -> None:
    tokenizer = Tokenizer.from_model(embedded_path("smollm2-135m"))
    vocab = vocabulary(tokenizer.token_bytes, tokenizer.vocab_size, tokenizer.special_ids, tokenizer.eos_ids)
    encode = lambda text: tokenizer.encode(text, False)
    print("| engine | objects | canonical | tokens | model steps | saved |\n|---|---|---|---|---|---|")
    for name, engine in (("xgrammar", Xgrammar(vocab)), ("llguidance", Llguidance(vocab, Pieces(vocab)))):
        same = steps = tokens = 0
        objects = flat_objects(200)
        for schema, value in objects:
            prepared = prepare(GrammarSpec(kind="json_schema", spec=json.dumps(schema)), name, Limits())  # type: ignore[arg-type]
            text = json.dumps(value, ensure_ascii=False)
            matcher = engine.compile(prepared.kind, prepared.text).matcher()
            ids, n = follow(_Walk(matcher), text, encode, tokenizer.token_bytes, jump=True)
            same += ids == encode(text)
            steps += n
            tokens += len(encode(text))
        print(f"| {name} | {len(objects)} | {same} | {tokens} | {steps} | {1 - steps / tokens:.0%} |", flush=True)


class _Walk:
    """A matcher with the few calls of a cursor that the fixture makes."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return bool(self._matcher.advance(token))

    def forced_tokens(self, limit: int) -> list[int]:
        return [] if self._matcher.complete else list(self._matcher.forced(limit))

    @property
    def can_stop(self) -> bool:
        return bool(self._matcher.complete)


if __name__ == "__main__":
    main()
