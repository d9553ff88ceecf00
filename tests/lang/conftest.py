from __future__ import annotations

import pytest

from tests.lang.fake import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests start when they are read, however slow this machine is: messages can be counted."""
    monkeypatch.setattr("frontend_lang.run.LINGER_S", 30.0)
