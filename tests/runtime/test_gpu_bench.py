"""The GPU's bench as far as it goes without one: its loads run on a fake device, its checks on a late one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_speed
from bench.gpu_carry import pack
from bench.gpu_checks import _decode
from bench.gpu_engine import Bench, drive, make_scheduler, prompts
from runtime.execute.fake import FakeRunner, fake_spec
from runtime.execute.runner import ModelRunner
from runtime.models.loader import load_runner
from tests.runtime.late_device import LateDevice
from tests.runtime.test_runner_cuda import late_runner
from tests.runtime.test_runner_cuda_loading import config
from tests.runtime.tiny_models import save, tiny_model


@pytest.fixture
def bench() -> Bench:
    runner: Any = FakeRunner(
        fake_spec(5000, 32768), n_pages=8000, page_size=16, max_running=64, latency_s=1e-4, check=False
    )
    return make_scheduler(runner)


def test_decode_is_measured_once_all_streams_decode(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "CONTEXT", 64)
    rate = gpu_speed.decode_rate(bench, 8)
    assert rate > 0
    assert gpu_speed.roofline(bench, 8, read_gb_s=1000.0) > 0


def test_every_measure_runs_to_its_end(bench: Bench) -> None:
    assert 0 <= gpu_speed.idle_share(bench) <= 1
    assert gpu_speed.prefill(bench)["prefill TFLOP/s"] >= 0
    assert gpu_speed.prefix_hit(bench)["2k prefix speed-up"] > 0
    assert gpu_speed.interference(bench)["ITL p99 inflation"] > 0


def test_prompts_share_what_they_are_said_to_share() -> None:
    first, second = prompts(2, 30, shared=20)
    assert first[:20].tolist() == second[:20].tolist()
    assert first[20:].tolist() != second[20:].tolist()


def test_drive_gives_every_request_its_tokens(bench: Bench) -> None:
    said = drive(bench.inner, prompts(5, 40), max_tokens=7)
    assert [len(tokens) for tokens in said.tokens.values()] == [7] * 5


def test_replayed_steps_equal_eager_ones(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path)
    plain = load_runner(config(folder))
    assert isinstance(plain, ModelRunner)
    answers = []
    for graphs in (True, False):
        runner = late_runner(folder, plain, LateDevice(), graphs=graphs, n_pages=400, max_rows=16)
        answers.append(_decode(runner, n_steps=12, in_flight=2 if graphs else 1))
    plain.close()
    assert answers[0] == answers[1]


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
