"""The GPU's bench without one: every section runs on the CPU over stand-ins, so that a first run dies of no typo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_carry import pack
from bench.gpu_checks import TOLERANCE, _parity
from bench.gpu_engine import prompts
from bench.gpu_machine import TINY, Scale, dry_machine
from bench.gpu_modules import MODULES
from kernels.base import LayerSpec
from kernels.flashinfer_plan import FlashInferOptions


@pytest.mark.parametrize("name", gpu.SECTIONS)
def test_every_section_runs_to_its_end(name: str) -> None:
    report = gpu.run([name], dry_machine())
    assert report.errors == {}
    assert report.passed, report.tables
    assert report.tables[name]
    assert f"## {name} (" in gpu.text(report)


def test_a_report_has_tables_json_and_published_figures_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--dry-run", "--only", "graphs,split", "--out", str(tmp_path)]) == 0
    said = json.loads((tmp_path / "gpu.json").read_text())
    assert set(said["tables"]) == {"graphs", "split"}
    assert said["tables"]["graphs"][0]["equal to eager"] == said["tables"]["graphs"][0]["steps"]
    out = capsys.readouterr().out
    assert out.index("graphs ...") < out.index("split ...") < out.index("# Fake H100") < out.index("## graphs")
    assert "| tok/s, 512 concurrent |  | 1.13e+04 |" in out
    assert (tmp_path / "gpu.md").read_text() in out + "\n"


def test_a_failing_section_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[gpu.Row]:
        raise ValueError("no such kernel")

    monkeypatch.setitem(gpu.SECTIONS, "parity", broken)
    monkeypatch.setitem(gpu.SECTIONS, "engine", lambda machine, card: [{"ok": False}])
    report = gpu.run(["parity", "split", "engine"], dry_machine())
    assert report.errors == {"parity": "ValueError: no such kernel"}
    assert set(report.tables) == {"split", "engine"}
    assert not report.passed


def test_what_does_not_fit_the_budget_is_left_out() -> None:
    report = gpu.run(["parity", "speed"], replace(dry_machine(), deadline=0.0))
    assert report.left_out == ["parity", "speed"]
    assert "Left out, no time: parity, speed" in gpu.text(report)


def test_prompts_share_what_they_are_said_to_share() -> None:
    first, second = prompts(2, 30, shared=20)
    assert first[:20].tolist() == second[:20].tolist()
    assert first[20:].tolist() != second[20:].tolist()


def test_tables_have_every_column_and_no_noise() -> None:
    assert gpu.table([{"a": 1, "b": 0.123456}, {"a": 2, "c": True}]).splitlines() == [
        "| a | b | c |",
        "|---|---|---|",
        "| 1 | 0.1235 |  |",
        "| 2 |  | True |",
    ]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--only", "parity,nonsense"])


def test_luggage_needs_the_package(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no flashinfer package"):
        pack(tmp_path, tmp_path / "out", headers=False, prebuild=False)


def test_luggage_holds_what_is_imported_and_the_templates(tmp_path: Path) -> None:
    """A package of the same shape: its backend's imports come along, the rest stays at home."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    package = wheels / "flashinfer"
    for name in ("__init__", "decode", "prefill", "cascade", "norm"):
        package.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").touch()
    for part in ("data/csrc/config.jinja", "data/csrc/other/x.cu", "data/include/a.cuh"):
        (package / part).parent.mkdir(parents=True, exist_ok=True)
        (package / part).touch()
    (wheels / "pynvml.py").touch()
    without = pack(wheels, out, headers=False, prebuild=False)
    assert sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()) == [
        "flashinfer/__init__.py", "flashinfer/cascade.py", "flashinfer/data/csrc/config.jinja",
        "flashinfer/decode.py", "flashinfer/prefill.py", "pynvml.py",
    ]  # fmt: skip
    assert without.n_files == 6
    assert pack(wheels, out, headers=True, prebuild=False).n_files == 7
    assert (tmp_path / "out.tar.gz").stat().st_size == pack(wheels, out, headers=True, prebuild=False).packed_bytes


def test_modules_are_those_that_the_bench_asks_for() -> None:
    """Every type of KV, window and cap that parity looks at, and the head sizes of all models."""
    prefill = [module for module in MODULES.values() if module.kind == "prefill"]
    assert {module.head_dim for module in prefill} == {TINY["head_dim"], Scale().head_dim}
    assert {module.kv for module in prefill} == {str(kv).removeprefix("torch.") for kv in TOLERANCE}
    assert {(module.window, module.soft_cap) for module in prefill} == {(False, False), (True, False), (False, True)}


def test_a_module_that_was_not_carried_fails_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("no module for float8_e4m3fn")

    monkeypatch.setattr("bench.gpu_checks.make_problem", missing)
    machine = dry_machine()
    row = _parity(machine, LayerSpec(4, 2, 64, 0.125), 16, torch.bfloat16, FlashInferOptions(), [(1, 3)])
    assert (row["ok"], row["failed"]) == (False, "RuntimeError: no module for float8_e4m3fn")
