"""Fixtures that the fault tests share with the live tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.conftest import checkpoint, start

__all__ = ["checkpoint", "start"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path.stem != "test_table":
            item.add_marker(pytest.mark.engine)
