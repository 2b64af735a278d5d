"""Examples in README and pages can be pasted, and their links lead somewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from scripts.doc_tables.__main__ import DOCS
from tests.support.fake_engine import Engine

ROOT = DOCS.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "patches/README.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "changes/README.md")),
    *DOCS.rglob("*.md"),
]


def send_block(page: str) -> str:
    """Return the code with which a page shows how to send."""
    [block] = [
        text
        for text in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        if "os.environ" in text
    ]
    return block


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_send_block_runs_as_pasted(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Against an engine that holds the checkpoint in the folder MODEL."""
    model = {"a.weight": torch.randn(40, 30).bfloat16(), "b.weight": torch.randn(500).bfloat16()}
    save_file(model, tmp_path / "model.safetensors")
    monkeypatch.setitem(os.environ, "MODEL", str(tmp_path))
    engine = Engine.of(model)
    client = httpx.Client

    def to_engine(**options: Any) -> httpx.Client:
        return client(transport=httpx.MockTransport(engine.answer))

    monkeypatch.setattr(httpx, "Client", to_engine)
    for times in (1, 2):
        exec(compile(send_block(page), page, "exec"), {})
        assert engine.version == 3 * times
        assert engine.holds(model)
    assert not any(part.manifest.full for part in engine.log)
    assert all(part.deltas for part in engine.log)


def test_recipes_compile() -> None:
    """Their imports are not installed here."""
    page = DOCS / "trainer-frameworks.md"
    recipes = re.findall(r"<!-- recipe -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(recipes) == 5
    for recipe in recipes:
        compile(recipe, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS).as_posix()}\n" in navigation
