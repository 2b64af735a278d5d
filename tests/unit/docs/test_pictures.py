"""Pictures are files of this project, say what they show, and render without internet."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import draw_pictures
from scripts.doc_tables.__main__ import DOCS, README

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = draw_pictures.PICTURES


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_the_file_is_current(picture: draw_pictures.Picture) -> None:
    """Run ``python -m scripts.draw_pictures`` if this fails."""
    file = DOCS / "pictures" / f"{picture.name}.svg"
    assert file.read_text() == draw_pictures.svg(picture)


@pytest.mark.parametrize("file", sorted((DOCS / "pictures").iterdir()), ids=lambda file: file.name)
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


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_boxes_are_inside_and_do_not_overlap(picture: draw_pictures.Picture) -> None:
    placed: list[draw_pictures.Box | draw_pictures.Grid] = [*picture.boxes, *picture.grids]
    edges = [
        (one.x - one.width // 2, one.y, one.x + one.width // 2, one.y + one.height)
        for one in placed
    ]
    for left, top, right, bottom in edges:
        assert left >= 0
        assert top >= 0
        assert right <= picture.width
        assert bottom <= picture.height
    for number, (left, top, right, bottom) in enumerate(edges):
        for other in edges[:number]:
            apart = left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]
            assert apart, placed[number].name


def test_the_tensor_has_each_changed_element_on_one_rank() -> None:
    [tensor] = [one for one in PICTURES if one.name == "tensor"]
    ranks = [grid for grid in tensor.grids if grid.name.startswith("rank")]
    checkpoint = [grid for grid in tensor.grids if grid not in ranks]
    changed = [
        [(one.kind, *at) for one in side for at in one.changed] for side in (checkpoint, ranks)
    ]
    assert sorted(changed[0]) == sorted(changed[1])
    assert len(changed[0]) == 3
    assert sum(one.rows for one in checkpoint) == sum(one.rows for one in ranks)


def test_the_site_has_the_drawing_in_the_page() -> None:
    page = '<p><img alt="One sync" src="pictures/sync.svg" /></p>'
    html = draw_pictures.on_page_content(page)
    assert "<img" not in html
    assert ">commit</text>" in html
    assert draw_pictures.on_page_content('<img src="dashboard.png" />') == (
        '<img src="dashboard.png" />'
    )


def test_no_page_needs_a_program_to_draw() -> None:
    for page in (README, *DOCS.rglob("*.md")):
        assert not re.search(
            r"^```mermaid|<script|\]\(https?://\S+\.(?:svg|png)\)", page.read_text(), re.M
        )
