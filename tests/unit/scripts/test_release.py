"""A release: its version, its section in the changelog, and what the tag must agree with."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from scripts import release

DAY = datetime.date(2026, 12, 1)
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- old\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "engine_ext").mkdir()
    (tmp_path / "engine_ext" / "__init__.py").write_text('"""Doc."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("how")
    return tmp_path


def test_fragments_become_section_of_changelog(root: Path) -> None:
    changes = root / "changes"
    (changes / "wait.added.md").write_text("- `--wait`.\n")
    (changes / "b.fixed.md").write_text("- Second.\n")
    (changes / "a.fixed.md").write_text("- First,\n  in two lines.\n")
    release.prepare(root, "0.2.0", DAY)
    assert (root / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- `--wait`.\n\n"
        "### Fixed\n\n- First,\n  in two lines.\n- Second.\n\n### Added\n\n- old\n"
    )
    assert [path.name for path in changes.iterdir()] == ["README.md"]
    assert '__version__ = "0.2.0"' in (root / "engine_ext" / "__init__.py").read_text()
    release.check(root, "v0.2.0")


@pytest.mark.parametrize(
    ("name", "text", "version", "said"),
    [
        ("a.new.md", "- x", "0.2.0", "a.new.md: a fragment is called"),
        ("a.md", "- x", "0.2.0", "a.md: a fragment is called"),
        ("a.added.md", "x", "0.2.0", "a.added.md: a fragment is a list"),
        ("a.added.md", "- x", "v0.2", "'v0.2' is no version"),
    ],
)
def test_what_is_wrong_changes_nothing(
    root: Path, name: str, text: str, version: str, said: str
) -> None:
    (root / "changes" / name).write_text(text)
    with pytest.raises(release.NotReady, match=said):
        release.prepare(root, version, DAY)
    assert (root / "CHANGELOG.md").read_text() == CHANGELOG
    assert (root / "changes" / name).exists()


def test_tag_must_agree_with_version_and_changelog(root: Path) -> None:
    with pytest.raises(release.NotReady, match=r"the tag is v0\.2\.0, the version 0\.1\.0"):
        release.check(root, "v0.2.0")
    with pytest.raises(release.NotReady, match=r"no section 0\.1\.0"):
        release.check(root, "v0.1.0")
    release.prepare(root, "0.2.0", DAY)
    with pytest.raises(release.NotReady, match="already"):
        release.prepare(root, "0.2.0", DAY)
    (root / "changes" / "late.fixed.md").write_text("- Late.")
    with pytest.raises(release.NotReady, match=r"not in the changelog yet: late\.fixed\.md"):
        release.check(root, "v0.2.0")


def test_fragments_of_the_tree_are_sound() -> None:
    assert set(release.fragments(release.ROOT / "changes")) <= set(release.SECTIONS)
