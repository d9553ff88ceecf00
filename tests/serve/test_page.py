"""The page in a real browser, where one is installed (Debian: chromium)."""

from __future__ import annotations

import subprocess

from tests.serve.running import CHROMIUM


def test_a_browser_chats_and_sees_the_tree(live, tmp_path):
    """The page asks the question in its address, shows the answer's cost, and draws the prefix it left behind."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=120000", "--timeout=120000", "--dump-dom", f"{live}/#ask=Hello"]
    html = subprocess.run(command, capture_output=True, text=True, timeout=200).stdout
    assert 'data-live="yes"' in html
    assert "tokens from the cache" in html or "of them from the cache" in html
    assert 'class="node' in html
