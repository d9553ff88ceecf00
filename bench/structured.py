"""What structured output costs, and what jumping forward gives back.

    python bench/structured.py                 # everything: the rate table alone takes most of an hour
    python bench/structured.py --only rate --batches 1,8 --shapes "flat5 keys,enums"
    python -m bench.jumps                      # the fixture: canonical tokens and steps, counted

Each row of the rate table compares, on one engine and the same prompts, answers under a grammar with free text of
exactly the same lengths, once without jumps (what masks cost) and once with (what forced text saves).
"""

from __future__ import annotations

import argparse
import itertools
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
from bench.structured_rates import HEAD, line, measure
from bench.structured_shapes import SHAPES, SHORT, numbered, prompts
from runtime.grammar.service import CompileService, vocabulary
from runtime.pull import embedded_path
from runtime.text.tokenizer import Tokenizer

PLAIN_EVERY_S = 0.25
HOSTILE: list[dict[str, Any]] = [
    {"regex": "((((a{0,9}){0,9}){0,9}){0,9})[a-z]{1,900}"},
    {"ebnf": 'root ::= root root | "a" | ""'},
    {"ebnf": "root ::= " + " ".join(["[a-z]{1,900}"] * 8)},
    {"json_schema": {"type": "string", "pattern": "^.{1,5000}$"}},
    {"json_schema": {"enum": [f"{i:08x}" for i in range(5000)]}},
    {"json_schema": {"type": "object", "properties": {f"k{i}": SHORT for i in range(900)}}},
]


@contextmanager
def engine(**options: Any) -> Iterator[rt.Engine]:
    with rt.Engine(kv_pool_tokens=32768, **options) as one:
        one.generate("warm", max_tokens=4)
        yield one


def show_rates(args: argparse.Namespace) -> None:
    print(HEAD)
    with engine() as one:
        one.generate("x", ebnf='root ::= "y"', max_tokens=2)  # both grammar engines are imported
        for batch in args.batches:
            for shape in args.shapes:
                print(line(batch, shape, measure(one, shape, batch, args.tokens, args.rounds)), flush=True)


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
    """Gaps between tokens of running streams: alone, while plain short requests come, and while requests with hostile
    grammars come as fast as they are answered. The three take turns."""
    chooser, serial = random.Random(1), itertools.count()

    def plain() -> dict[str, Any]:
        time.sleep(PLAIN_EVERY_S)
        return {}

    def hostile() -> dict[str, Any]:
        key, value = next(iter(chooser.choice(HOSTILE).items()))
        fresh = {"description": str(next(serial)), **value} if key == "json_schema" else value
        return {key: fresh}

    with engine() as one:
        one.generate("x", ebnf='root ::= "y"', max_tokens=2)
        found: dict[str, list[float]] = {"alone": [], "plain requests": [], "hostile grammars": []}
        thrown = dict.fromkeys(found, 0)
        for _ in range(args.rounds):
            for name, make in zip(found, (None, plain, hostile), strict=True):
                with throwing(one, make) as count:
                    found[name] += gaps(one, args.tokens)
                thrown[name] += count[0]
    p99 = {name: statistics.quantiles(g, n=100)[98] * 1e3 for name, g in found.items()}
    for name, ms in p99.items():
        print(f"gap between tokens, p99, {name} ({thrown[name]}): {ms:.1f} ms ({ms / p99['alone']:.2f}x)")


@contextmanager
def throwing(one: rt.Engine, make: Callable[[], dict[str, Any]] | None) -> Iterator[list[int]]:
    """Short requests with the options that `make` gives, one after the other; counts them."""
    stop, count = threading.Event(), [0]

    def throw() -> None:
        while make is not None and not stop.is_set():
            with suppress(rt.RametError):
                one.generate("x", max_tokens=2, **make())
            count[0] += 1

    thread = threading.Thread(target=throw)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


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
    parser.add_argument("--batches", type=lambda t: [int(x) for x in t.split(",")], default=[1, 8, 32])
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="of the rate table: each is four runs")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--schemas", type=int, default=2000)
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs; answers up to {args.tokens} tokens; rate: medians of {args.rounds} rounds\n")
    for name in args.only or PARTS:
        PARTS[name](args)
        print(flush=True)


if __name__ == "__main__":
    main()
