"""The page in a real browser, where one is installed (Debian: chromium and chromium-driver)."""

from __future__ import annotations

from tests.lang.engines import toy_engine, toy_server
from tests.serve.browser import browser

HOVER = """
const rect = document.querySelector("#tree rect.pinned");
rect.dispatchEvent(new PointerEvent("pointerenter"));
return document.getElementById("tip").textContent;
"""


def test_a_person_chats_and_sees_what_is_shared_and_who_uses_it(tmp_path):
    """The question in the address is asked; while it is answered the tree names its user and a lane grows."""
    with toy_engine(latency_s=0.03) as engine, toy_server(engine) as url, browser(tmp_path) as page:
        page.open(f"{url}/#ask=Hello%20there")
        page.wait('document.body.dataset.live === "yes"', 30)
        page.wait('document.querySelector("#tree rect.pinned")', 30)
        tip = page.script(HOVER)
        assert "hits" in tip
        assert "in use by" in tip
        page.wait('document.querySelectorAll("#lanes rect").length >= 1', 10)
        page.wait('document.querySelectorAll("#history polyline").length === 2', 10)
        assert page.script('return document.querySelector("#lanes").textContent').strip()
        page.wait('document.getElementById("log").textContent.includes("tokens")', 90)
        assert "of them from the cache" in page.script('return document.getElementById("log").textContent')
        assert page.script(
            "return performance.getEntriesByType('resource').every(r => r.name.startsWith(location.origin))"
        )
