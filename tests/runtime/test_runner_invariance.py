"""Law 13: warm = cold = alone = crowded = chunked = retracted, bit for bit, around every page border."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kernels.reference import KEY_BLOCK
from runtime.config import EngineConfig
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner
from tests.runtime.step_plans import Row, Seq, make_plan, slot_of
from tests.runtime.tiny_models import VOCAB, save, tiny_model

PAGE_SIZES = (1, 4, 16)
ALL_TOPS = 8
Answer = tuple[list[float], list[int]]


def lengths(page_size: int) -> list[int]:
    """Around the borders; a prompt has at least two tokens here, so that there is a prefix to reuse."""
    p = page_size
    return sorted({n for n in (p - 1, p, p + 1, 2 * p, 2 * p + 1) if n >= 2})


@pytest.fixture(scope="module", params=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"sliding_window": 7} if request.param == "mistral" else {}
    return save(tiny_model(request.param, **changes), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=PAGE_SIZES)
def runner(request: pytest.FixtureRequest, folder: Path) -> Iterator[ModelRunner]:
    runner = load(folder, page_size=request.param, threads=1)
    yield runner
    runner.close()


def load(folder: Path, page_size: int, threads: int, backend: str = "reference") -> ModelRunner:
    return load_runner(
        EngineConfig(model=str(folder), backend=backend, kv_pool_tokens=2048, page_size=page_size, threads=threads)
    )


class Bench:
    """Runs rows on the runner, handing out pages in a scattered order."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.page_size = runner.page_size
        self._free = np.random.default_rng(0).permutation(runner.n_pages).tolist()

    def seq(self, tokens: list[int], shared: list[int] | None = None) -> Seq:
        """A sequence with room for 4 more tokens; `shared` are its first pages."""
        shared = shared or []
        n_own = -(-(len(tokens) + 4) // self.page_size) - len(shared)
        return Seq(list(tokens), [*shared, *(self._free.pop() for _ in range(n_own))])

    def step(self, *rows: Row) -> Answer:
        """(logprobs of the alternatives, their ids) of the first sampled row."""
        result = self.runner.launch(make_plan(rows, self.page_size, n_top=ALL_TOPS)).result(60)
        return result.top_logprobs[0].tolist(), result.top_ids[0].tolist()

    def decode(self, seq: Seq, *others: Row) -> Answer:
        return self.step(Row(seq, len(seq.tokens) - 1, len(seq.tokens)), *others)

    def crowd(self, n: int) -> list[Row]:
        """Other rows of several lengths: decodes with long histories and prefills."""
        rng = np.random.default_rng(n)
        rows = []
        for length in (3, 17, 40, 5, 29)[: n % 6]:
            seq = self.seq(rng.integers(0, VOCAB, length).tolist())
            self.step(Row(seq, 0, length - 1))
            rows.append(Row(seq, length - 1, length) if length % 2 else Row(seq, 0, length))
        return rows


def prompt(n: int) -> list[int]:
    return np.random.default_rng(n).integers(0, VOCAB, n).tolist()


def test_every_way_to_an_answer_gives_the_same_bits(runner: ModelRunner) -> None:
    for n in lengths(runner.page_size):
        check_all_ways(runner, prompt(n))


def test_a_prompt_longer_than_a_key_block_too(runner: ModelRunner) -> None:
    tokens = prompt(KEY_BLOCK + 1)
    cold, after = alone(Bench(runner), tokens)
    assert chunked(Bench(runner), tokens) == cold
    assert warm_tail_copy(Bench(runner), tokens) == cold
    assert retracted(Bench(runner), tokens) == after


def test_two_threads_keep_the_law(folder: Path) -> None:
    runner = load(folder, page_size=4, threads=2)
    check_all_ways(runner, prompt(9))
    runner.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_native_kernels_keep_the_law(folder: Path, threads: int) -> None:
    runner = load(folder, page_size=4, threads=threads, backend="native")
    for n in (9, KEY_BLOCK + 1):
        check_all_ways(runner, prompt(n))
    runner.close()


def check_all_ways(runner: ModelRunner, tokens: list[int]) -> None:
    cold, after = alone(Bench(runner), tokens)
    for way in (chunked, crowded, warm_whole_pages, warm_tail_copy, warm_tail_of_this_step, by_decoding):
        assert way(Bench(runner), tokens) == cold, f"{way.__name__}, {len(tokens)} tokens"
    for way in (decoded_in_a_crowd, retracted):
        assert way(Bench(runner), tokens) == after, f"{way.__name__}, {len(tokens)} tokens"


def alone(bench: Bench, tokens: list[int]) -> tuple[Answer, Answer]:
    """The answer after the prompt, and after two more tokens."""
    seq = bench.seq(tokens)
    cold = bench.step(Row(seq, 0, len(tokens)))
    return cold, decode_two(bench, seq)


def decode_two(bench: Bench, seq: Seq) -> Answer:
    for token in (5, 11):
        seq.tokens.append(token)
        answer = bench.decode(seq)
    return answer


def chunked(bench: Bench, tokens: list[int]) -> Answer:
    seq, n = bench.seq(tokens), len(tokens)
    cuts = sorted({0, 1, n // 2, n - 1, n})
    for start, stop in itertools.pairwise(cuts):
        answer = bench.step(Row(seq, start, stop))
    return answer


def crowded(bench: Bench, tokens: list[int]) -> Answer:
    others = bench.crowd(5)
    seq = bench.seq(tokens)
    plan = make_plan([*others, Row(seq, 0, len(tokens))], bench.page_size, n_top=ALL_TOPS)
    result = bench.runner.launch(plan).result(60)
    return result.top_logprobs[-1].tolist(), result.top_ids[-1].tolist()


def warm_whole_pages(bench: Bench, tokens: list[int]) -> Answer:
    n_shared = (len(tokens) - 1) // bench.page_size
    first = bench.seq([*tokens[: n_shared * bench.page_size], 3])
    bench.step(Row(first, 0, len(first.tokens)))
    seq = bench.seq(tokens, shared=first.pages[:n_shared])
    return bench.step(Row(seq, n_shared * bench.page_size, len(tokens)))


def warm_tail_copy(bench: Bench, tokens: list[int]) -> Answer:
    """Another sequence holds all but the last token; the part inside a page is copied."""
    reuse = len(tokens) - 1
    first = bench.seq(tokens[:reuse])
    bench.step(Row(first, 0, reuse))
    seq, copies = forked(bench, first, tokens, reuse)
    return bench.step(Row(seq, reuse, len(tokens), copies=copies))


def warm_tail_of_this_step(bench: Bench, tokens: list[int]) -> Answer:
    """The source of the tail is itself prefilled in the step that copies it."""
    reuse = len(tokens) - 1
    first = bench.seq(tokens[:reuse])
    seq, copies = forked(bench, first, tokens, reuse)
    return bench.step(Row(seq, reuse, len(tokens), copies=copies), Row(first, 0, reuse))


def forked(bench: Bench, first: Seq, tokens: list[int], reuse: int) -> tuple[Seq, list[tuple[int, int]]]:
    whole = reuse // bench.page_size
    seq = bench.seq(tokens, shared=first.pages[:whole])
    tail = range(whole * bench.page_size, reuse)
    return seq, [(slot_of(first, p, bench.page_size), slot_of(seq, p, bench.page_size)) for p in tail]


def by_decoding(bench: Bench, tokens: list[int]) -> Answer:
    seq = bench.seq(tokens)
    bench.step(Row(seq, 0, 1))
    for position in range(1, len(tokens)):
        answer = bench.step(Row(seq, position, position + 1))
    return answer


def decoded_in_a_crowd(bench: Bench, tokens: list[int]) -> Answer:
    others = bench.crowd(4)
    seq = bench.seq(tokens)
    bench.step(Row(seq, 0, len(tokens)), *others)
    for token in (5, 11):
        seq.tokens.append(token)
        answer = bench.decode(seq, *others)
    return answer


def retracted(bench: Bench, tokens: list[int]) -> Answer:
    """Its pages were taken after one more token: prompt and output are prefilled again, elsewhere."""
    seq = bench.seq([*tokens, 5])
    bench.step(Row(seq, 0, len(tokens)))
    bench.decode(seq)
    again = bench.seq([*tokens, 5, 11])
    return bench.step(Row(again, 0, len(again.tokens)))
