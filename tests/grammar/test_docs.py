"""The support table in the docs is what the tests run."""

from __future__ import annotations

from tests.grammar.support import PAGE, with_table


def test_the_support_table_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run python -m tests.grammar.support"
