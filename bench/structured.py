"""What structured output costs, and what jumping forward gives back.

    python bench/structured.py                 # everything, about three minutes on two quiet cores
    python bench/structured.py --only rate --batches 1,8 --shapes flat3,flat20
    python -m bench.jumps                      # the fixture: canonical tokens and steps, counted

Each row of the rate table compares, on one engine and the same prompts, answers under a grammar with free text of
exactly the same lengths, once without jumps (what masks cost) and once with (what forced text saves).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ramet as rt
from runtime.grammar.service import CompileService, vocabulary
from runtime.pull import embedded_path
from runtime.text.tokenizer import Tokenizer

STR, INT, BOOL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 12}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 9999}
HOSTILE: list[dict[str, Any]] = [
    {"regex": "((((a{0,9}){0,9}){0,9}){0,9})[a-z]{1,900}"},
    {"ebnf": 'root ::= root root | "a" | ""'},
    {"ebnf": "root ::= " + " ".join(["[a-z]{1,900}"] * 8)},
    {"json_schema": {"type": "string", "pattern": "^.{1,5000}$"}},
    {"json_schema": {"enum": [f"{i:08x}" for i in range(5000)]}},
    {"json_schema": {"type": "object", "properties": {f"k{i}": SHORT for i in range(900)}}},
]


def record(**props: Any) -> dict[str, Any]:
    return {"type": "object", "properties": props, "required": list(props), "additionalProperties": False}


def numbered(n: int, value: Any) -> dict[str, Any]:
    return record(**{f"field_{i}": value for i in range(n)})


def tools(n: int) -> dict[str, Any]:
    """A required call of one of n tools."""
    calls = [record(name={"const": f"tool_{i}"}, arguments=record(city=SHORT, days=DIGITS)) for i in range(n)]
    return {"anyOf": calls}


TREE = {
    "$defs": {"node": record(value=DIGITS, left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    "$ref": "#/$defs/node",
}
SHAPES: dict[str, dict[str, Any]] = {
    "flat3": record(name=SHORT, population=DIGITS, is_capital=BOOL),
    "flat5 keys": record(first_name=SHORT, last_name=SHORT, email_address=SHORT, phone_number=DIGITS, is_active=BOOL),
    "flat20": numbered(20, BOOL),
    "flat200": numbered(200, {"enum": [0, 1]}),
    "nested": record(user=record(name=SHORT, address=record(city=SHORT, zip=DIGITS)), ok=BOOL),
    "enums": record(**{k: {"enum": ["small", "medium", "large"]} for k in ("size", "speed", "quality", "price")}),
    "array": record(items={"type": "array", "items": DIGITS, "minItems": 12, "maxItems": 12}),
    "recursive": TREE,
    "long string": record(summary={"type": "string", "minLength": 120, "maxLength": 160}),
    "free string": record(title=STR, summary=STR),
    "tool of 1": tools(1),
    "tool of 30": tools(30),
}
CITIES = ["Paris", "Rome", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Quito"]


def prompts(n: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"({i}) Describe {CITIES[i % 8]} as JSON."}] for i in range(n)]


@contextmanager
def engine(**options: Any) -> Iterator[rt.Engine]:
    with rt.Engine(kv_pool_tokens=32768, **options) as one:
        one.generate("warm", max_tokens=4)
        yield one


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def free(one: rt.Engine, lengths: list[int]) -> float:
    """Seconds of unconstrained answers of exactly these lengths, submitted together."""
    submits = [
        one.submit_of(p, temperature=0, max_tokens=n, ignore_eos=True)
        for p, n in zip(prompts(len(lengths)), lengths, strict=True)
    ]
    return timed(lambda: one._wait(one.generator.complete_many(submits)))[0]


def constrained(one: rt.Engine, schema: Any, batch: int, max_tokens: int) -> tuple[float, list[Any], int]:
    steps = one.stats()["steps"]
    seconds, found = timed(
        lambda: one.generate(prompts(batch), json_schema=schema, temperature=0, max_tokens=max_tokens)
    )
    return seconds, found, one.stats()["steps"] - steps


def rates(one: rt.Engine, shape: str, batch: int, max_tokens: int, repeats: int) -> dict[str, float]:
    """Best of `repeats`, free and constrained in turn."""
    schema = SHAPES[shape]
    constrained(one, schema, batch, max_tokens)  # compiles, and fills the prefix cache
    ours: list[float] = []
    theirs: list[float] = []
    found: list[Any] = []
    steps = 0
    for _ in range(repeats):
        seconds, found, steps = constrained(one, schema, batch, max_tokens)
        ours.append(seconds)
        theirs.append(free(one, [a.usage.completion_tokens for a in found]))
    tokens = sum(a.usage.completion_tokens for a in found)
    return {
        "rate": tokens / min(ours),
        "free": tokens / min(theirs),
        "steps": steps,
        "tokens": tokens,
        "longest": max(a.usage.completion_tokens for a in found),
        "canonical": statistics.mean(is_canonical(one, a) for a in found),
    }


def is_canonical(one: rt.Engine, answer: Any) -> bool:
    """Whether the answer's tokens, without the one that ended it, are the tokenizer's own for its text."""
    ids = [t for t in answer.token_ids if t not in one.generator.eos_ids]
    return ids == one.tokenizer.encode(answer.text, False)


def show_rates(args: argparse.Namespace) -> None:
    cells = [(b, s) for b in args.batches for s in args.shapes if b == args.batches[0] or args.all or s in args.main]
    rows: dict[tuple[int, str], dict[bool, dict[str, float]]] = {cell: {} for cell in cells}
    for jump in (False, True):
        with engine(jump_forward=jump) as one:
            one.generate("x", ebnf='root ::= "y"', max_tokens=2)  # both grammar engines are imported
            for batch, shape in cells:
                rows[batch, shape][jump] = rates(one, shape, batch, args.tokens, args.repeats)
    print(
        "| batch | schema | free tok/s | masked, no jumps | overhead | with jumps | gain | steps saved "
        "| canonical without / with jumps |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (batch, shape), row in rows.items():
        off, on = row[False], row[True]
        print(
            f"| {batch} | {shape} | {off['free']:.0f} | {off['rate']:.0f} | {off['free'] / off['rate'] - 1:+.1%} "
            f"| {on['rate']:.0f} | {on['rate'] / on['free']:.2f}x | {1 - on['steps'] / off['steps']:.0%} "
            f"| {off['canonical']:.0%} / {on['canonical']:.0%} |",
            flush=True,
        )


def first_token_s(one: rt.Engine, **options: Any) -> float:
    start = time.perf_counter()
    stream = one.stream(prompts(1)[0], temperature=0, max_tokens=2, **options)
    next(iter(stream))
    seconds = time.perf_counter() - start
    for _ in stream:
        pass
    return seconds


def show_first_use(args: argparse.Namespace) -> None:
    with engine() as one:
        one.generate("x", ebnf='root ::= "y"', max_tokens=2)
        first_token_s(one)
        plain = [first_token_s(one) for _ in range(args.samples)]
        fresh = [first_token_s(one, json_schema=numbered(20, {"enum": [i, -i]})) for i in range(1, args.samples + 1)]
        again = [first_token_s(one, json_schema=numbered(20, {"enum": [1, -1]})) for _ in range(args.samples)]
    p, f, a = (statistics.median(x) * 1e3 for x in (plain, fresh, again))
    print(
        f"first token, warm prefix: free {p:.1f} ms; new schema of 20 properties {f:.1f} ms ({f - p:+.1f}); "
        f"known schema {a:.1f} ms"
    )


def show_hostile(args: argparse.Namespace) -> None:
    """Gaps between tokens of running streams, alone and while hostile grammars are thrown at the engine."""
    with engine() as one:
        one.generate("x", ebnf='root ::= "y"', max_tokens=2)
        quiet = gaps(one, args.tokens)
        stop, thrown = threading.Event(), [0]

        def throw() -> None:
            chooser = random.Random(1)
            while not stop.is_set():
                options = dict(chooser.choice(HOSTILE))
                key, value = next(iter(options.items()))
                options[key] = {"description": str(thrown[0]), **value} if key == "json_schema" else value
                with suppress(rt.RametError):
                    one.generate("x", max_tokens=2, **options)
                thrown[0] += 1

        thread = threading.Thread(target=throw)
        thread.start()
        busy = gaps(one, args.tokens)
        stop.set()
        thread.join()
    before, after = (statistics.quantiles(g, n=100)[98] * 1e3 for g in (quiet, busy))
    print(
        f"gap between tokens, p99: alone {before:.1f} ms; under {thrown[0]} hostile grammars {after:.1f} ms "
        f"({after / before:.2f}x)"
    )


def gaps(one: rt.Engine, n_tokens: int) -> list[float]:
    found: list[float] = []

    def follow(prompt: Any) -> None:
        last = None
        for _ in one.stream(prompt, temperature=0, max_tokens=n_tokens * 3, ignore_eos=True):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now

    threads = [threading.Thread(target=follow, args=(p,)) for p in prompts(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def show_memory(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_model(embedded_path("smollm2-135m"))
    vocab = vocabulary(tokenizer.token_bytes, tokenizer.vocab_size, tokenizer.special_ids, tokenizer.eos_ids)
    service = CompileService(vocab, cache_bytes=32 << 20)
    service.warm().result()
    marks = []
    seconds = 0.0
    for i in range(args.schemas):
        spec = rt.GrammarSpec(kind="json_schema", spec=json.dumps(numbered(5, {"enum": [i, "x"]})))
        start = time.perf_counter()
        compiled = service.compile_async(spec).result()
        seconds += time.perf_counter() - start
        compiled.cursor().forced_tokens(8)
        if i in (args.schemas // 5, args.schemas - 1):
            marks.append(rss_mb())
    stats = service.stats()
    service.close()
    print(
        f"memory: {marks[0]:.0f} MB after {args.schemas // 5} schemas, {marks[1]:.0f} MB after {args.schemas}; "
        f"{seconds / args.schemas * 1e3:.1f} ms each; {stats['cache_evictions_total']} evictions"
    )


PARTS = {"rate": show_rates, "first": show_first_use, "hostile": show_hostile, "memory": show_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), action="append")
    parser.add_argument("--batches", type=lambda t: [int(x) for x in t.split(",")], default=[8, 1, 32])
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=list(SHAPES))
    parser.add_argument("--main", type=lambda t: t.split(","), default=["flat3", "flat5 keys", "tool of 1"])
    parser.add_argument("--all", action="store_true", help="every shape at every batch size")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--schemas", type=int, default=2000)
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {args.repeats} repeats, best of each; answers up to {args.tokens} tokens\n")
    for name in args.only or PARTS:
        PARTS[name](args)
        print(flush=True)


if __name__ == "__main__":
    main()
