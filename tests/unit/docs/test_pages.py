"""Examples in README and pages can be pasted, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.doc_tables.__main__ import DOCS
from tests.support.cases import in_one_test

ROOT = DOCS.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "patches/README.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "changes/README.md")),
    *DOCS.rglob("*.md"),
]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@in_one_test("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS).as_posix()}\n" in navigation
