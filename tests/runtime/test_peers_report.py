"""The report on peers: ratios turn the right way round, and targets stand beside what was reached."""

from __future__ import annotations

from bench.peers_join import join, read
from bench.peers_report import BF16, DEFAULT, ratio_table, table
from runtime.bench.workloads import WORKLOADS

SINGLE, FANOUT = WORKLOADS["single"].measures[0], WORKLOADS["fanout"].measures[0]
FIGURES = {
    SINGLE: {DEFAULT: 150.0, BF16: 60.0, "llama.cpp Q4_1": 100.0, "vLLM bf16": 20.0},
    FANOUT: {DEFAULT: 4.0, BF16: 6.0, "llama.cpp Q4_1": 100.0, "vLLM bf16": 12.0},
}
NAMES = [DEFAULT, BF16, "llama.cpp Q4_1", "vLLM bf16"]


def test_more_is_better_for_rates_and_less_for_seconds() -> None:
    rows = ratio_table(FIGURES, NAMES)
    assert rows[-2] == "| decode, 1 stream | 1.50 × | llama.cpp Q4_1 | 1.5 × | 3.00 × | vLLM bf16 | 2.0 × |"
    assert rows[-1] == ("| 16-way fan-out over 1.6k tokens | 3.00 × | vLLM bf16 | 3.0 × | 2.00 × | vLLM bf16 | 1.7 × |")


def test_what_a_peer_could_not_run_is_left_open() -> None:
    missing = {SINGLE: {DEFAULT: 150.0}}
    assert table(missing, NAMES)[-1] == "| decode, 1 stream | tok/s | 150.00 | – | – | – |"
    assert ratio_table(missing, NAMES)[-1] == "| decode, 1 stream | – | – | 1.5 × | – | – | 2.0 × |"


def test_runs_are_joined_row_by_row_and_ratios_stay_within_a_run() -> None:
    report = lambda about, figures: read("\n".join([about, "", *table(figures, NAMES), "", "ratios"]))
    slow = {SINGLE: {DEFAULT: 90.0, "llama.cpp Q4_1": 100.0}, FANOUT: {DEFAULT: 4.0}}
    about, figures, names = join([report("the first", FIGURES), report("the second", slow)])
    assert (about, names) == ("Run 1: the first\nRun 2: the second", NAMES)
    rows = ratio_table(figures, names)[4:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "decode, 1 stream, run 1", "decode, 1 stream, run 2", "16-way fan-out over 1.6k tokens, run 1",
    ]  # fmt: skip
    assert rows[1].startswith("| decode, 1 stream, run 2 | 0.90 × | llama.cpp Q4_1 | 1.5 × | – ")
