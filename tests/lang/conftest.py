from __future__ import annotations

import pytest

from tests.lang.fake import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()
