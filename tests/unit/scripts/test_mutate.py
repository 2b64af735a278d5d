"""Mutants are found again, and the rooms of `scripts.mutate` exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutate

SOURCE = """
class Box:
    def holds(self, size):
        if size < 3 and size != 2:
            return size + 1
        self.full = True
"""


def test_mutants_are_found_again_by_name(tmp_path: Path) -> None:
    file = tmp_path / "box.py"
    file.write_text(SOURCE)
    found = list(mutate.mutants_of(file, tmp_path))
    assert {m.kind for m in found} >= {"compare", "and/or", "arithmetic", "return", "delete"}
    moved = tmp_path / "moved.py"
    file.rename(moved)
    for mutant in found:
        assert mutate.find(mutant, [moved]) == moved
        changed = mutate.mutated(SOURCE, mutant)
        assert changed is not None
        compile(changed, "moved.py", "exec")


@pytest.mark.parametrize("room", mutate.ROOMS)
def test_folders_of_mutated_room_exist(room: str) -> None:
    packages, tests = mutate.ROOMS[room]
    for folder in packages:
        assert list((mutate.ROOT / folder).rglob("*.py")), folder
    for folder in tests:
        assert list((mutate.ROOT / folder).rglob("test_*.py")), folder


def test_room_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tests in tests/nothing"):
        mutate.Scratch(tmp_path, ["tests/nothing"], cpu_s=1)
