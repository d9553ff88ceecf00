"""The trace replay: exact on a hand-made trace, and what the policies promise on the sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.replay_cache import clairvoyant, replay
from bench.traces import Trace, Turn, load

ROOT = Path(__file__).parents[2]
SESSIONS = ROOT / "bench/data/sessions.jsonl.gz"


def turn(t: float, n: int, first: int, program: str = "", *, last: bool = False) -> Turn:
    """A prompt of `n` blocks of ten tokens and three tokens more."""
    return Turn(t, 10 * n + 3, ((first, first + n - 1),), program, "tool_use", last)


def test_counts_are_exact() -> None:
    turns = [turn(0, 4, 0, "a"), turn(1, 4, 100, "b"), turn(2, 5, 0, "a"), turn(3, 5, 100, "b")]
    trace = Trace("toy", 10, turns)
    roomy = replay(trace, 1000, "lru")
    assert (roomy.prompt_tokens, roomy.recomputed) == (192, 192 - 80)
    tight = replay(trace, 50, "lru")  # each session flushes the other
    assert tight.recomputed == 192 - 10  # only the first block of a survives b
    best = clairvoyant(trace, 50)
    assert best.recomputed < tight.recomputed
    assert clairvoyant(trace, 1000).recomputed == roomy.recomputed


def test_a_closed_program_makes_room() -> None:
    turns = [turn(0, 4, 0, "a"), turn(1, 4, 100, "dead", last=True), turn(2, 4, 200, "c"), turn(3, 5, 0, "a")]
    trace = Trace("toy", 10, turns)
    assert replay(trace, 80, "lru").recomputed > replay(trace, 80, "hints", "close").recomputed
    assert replay(trace, 80, "hints", "close").recomputed == clairvoyant(trace, 80).recomputed


def test_hints_on_the_sample_sessions() -> None:
    trace = load(SESSIONS, concurrency=16)
    pool = 2_000_000
    lru = replay(trace, pool, "lru").recomputed
    assert replay(trace, pool, "hints", "none").recomputed == lru
    assert replay(trace, pool, "hints", "close").recomputed < 0.9 * lru
    assert clairvoyant(trace, pool).recomputed < replay(trace, pool, "hints", "tools").recomputed < 0.9 * lru


def test_the_script_prints_and_plots(tmp_path: Path) -> None:
    svg, out = tmp_path / "plot.svg", tmp_path / "out.json"
    trace = ROOT / "bench/data/conversation.jsonl.gz"
    args = [str(trace), "--pools", "0.5M,1M", "--policies", "lru,slru", "--svg", str(svg), "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/replay_cache.py"), *args], capture_output=True, text=True, check=True
    )
    assert "500 requests" in done.stdout
    assert "clairvoyant" in done.stdout
    assert svg.read_text().startswith("<svg")
    assert len(json.loads(out.read_text())) == 6


def test_a_file_of_neither_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    with pytest.raises(ValueError, match="neither a Mooncake trace"):
        load(path)
