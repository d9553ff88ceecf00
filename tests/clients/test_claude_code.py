"""Claude Code itself, headless, against our Anthropic endpoint: it streams an answer, calls a tool, and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.messages import Submit, unpack_ids
from tests.serve.running import running
from tests.serve.scripted import serve

CLAUDE = shutil.which("claude")


def script(submit: Submit) -> Sequence[str]:
    """Reads the file it is asked about, then says what is in it."""
    prompt = bytes(int(i) for i in unpack_ids(submit.tokens) if i < 256).decode("utf-8", "replace")
    asked = prompt.rfind("note.txt")
    if asked >= 0 and "radish-42" in prompt:
        return ["The note says ", "radish-42."]
    if asked >= 0 and "<tools>" in prompt:
        path = _path_in(prompt)
        return list(f'<tool_call>\n{{"name": "Read", "arguments": {{"file_path": "{path}"}}}}\n</tool_call>')
    return ["Fine."]


def _path_in(prompt: str) -> str:
    at = prompt.rfind("note.txt")
    return prompt[prompt.rfind(" ", 0, at) + 1 : at] + "note.txt"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "note.txt").write_text("radish-42\n")
    return tmp_path


def test_it_reads_a_file_through_its_own_tool(home: Path) -> None:
    served = serve(script=script, context=1_000_000)
    with running(served) as url:
        env = {
            **os.environ,
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "fake",
            "ANTHROPIC_SMALL_FAST_MODEL": "fake",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
        }
        command = [CLAUDE, "-p", f"What does {home}/note.txt say?", "--allowedTools", "Read", "--model", "fake"]
        done = subprocess.run(
            command, cwd=home, env=env, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "radish-42" in done.stdout
    assert len(served.client.submits) >= 2
