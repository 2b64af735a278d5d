"""Pictures are files of this project, say what they show, and render without internet."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from scripts import inline_pictures
from scripts.doc_tables.__main__ import DOCS, README
from tests.support.cases import in_one_test

SVG = "{http://www.w3.org/2000/svg}"


@in_one_test("file", sorted((DOCS / "pictures").iterdir()))
def test_a_picture_has_text_and_both_schemes(file: Path) -> None:
    drawing = ElementTree.parse(file).getroot()
    named = {one.get("id"): one.text for one in drawing if one.tag in (f"{SVG}title", f"{SVG}desc")}
    assert list(named) == (drawing.get("aria-labelledby") or "").split()
    assert all(named.values())
    assert len(list(drawing.iter(f"{SVG}text"))) >= 8
    [style] = [one.text or "" for one in drawing.iter(f"{SVG}style")]
    for scheme in ("prefers-color-scheme:dark", "scheme=default", "scheme=slate"):
        assert scheme in style
    assert "url(" not in style


def test_the_tensor_has_each_changed_element_on_one_rank() -> None:
    """Three elements of the checkpoint, and the same three on the ranks."""
    assert (DOCS / "pictures" / "tensor.svg").read_text().count('<rect class="m"') == 6


def test_the_site_has_the_drawing_in_the_page() -> None:
    page = '<p><img alt="One sync" src="pictures/sync.svg" /></p>'
    html = inline_pictures.on_page_content(page)
    assert "<img" not in html
    assert ">commit</text>" in html
    assert inline_pictures.on_page_content('<img src="dashboard.png" />') == (
        '<img src="dashboard.png" />'
    )


def test_no_page_needs_a_program_to_draw() -> None:
    for page in (README, *DOCS.rglob("*.md")):
        assert not re.search(
            r"^```mermaid|<script|\]\(https?://\S+\.(?:svg|png)\)", page.read_text(), re.M
        )
