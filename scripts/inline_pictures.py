"""A hook of mkdocs: puts the SVG of each picture into the page in place of the image.

So its text and the site's choice of light or dark reach it. The files in docs/pictures are edited
by hand: every box, arrow and line of text is a line.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"


def on_page_content(html: str, **_: Any) -> str:
    """Put the SVG of each picture into the page."""

    def inline(image: re.Match[str]) -> str:
        drawing = FOLDER / unescape(image[1])
        return f'<span style="display:block;overflow-x:auto">{drawing.read_text().strip()}</span>'

    return re.sub(r'<img [^>]*src="(?:\.\./)*pictures/([\w-]+\.svg)"[^>]*>', inline, html)
