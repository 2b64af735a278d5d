"""Names of tests are short enough to read in a report: at most 60 characters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
MOST = 60
# Longer names that are left, by folder. The numbers can only fall.
LEFT: dict[str, int] = {}


def long_names(path: Path) -> list[str]:
    """The names of a file's tests that are too long."""
    names = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M)
    return [name for name in names if len(name) > MOST]


def test_names_are_short() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        room = path.relative_to(TESTS).parts[1] if path.is_relative_to(TESTS / "unit") else ""
        found.setdefault(room, []).extend(long_names(path))
    more = {room: names for room, names in found.items() if len(names) > LEFT.get(room, 0)}
    assert more == {}
