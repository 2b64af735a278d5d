"""The Python blocks of README and pages, by the mark above each: ``<!-- example: NAME -->``."""

from __future__ import annotations

import re
from typing import Final

from scripts.doc_tables.__main__ import DOCS, README

TEXTS: Final = {page.name: page.read_text() for page in (README, *sorted(DOCS.glob("*.md")))}


def examples(page: str) -> dict[str, str]:
    """Return the marked blocks of a page, by name."""
    return dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", TEXTS[page], re.S))
