"""Which page shows which table, and the marked regions that they stand in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from scripts.doc_tables import conformance, faults, golden, openapi, reference

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
OPENAPI: Final = "openapi.json"
_REGION: Final = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /generated -->)", re.DOTALL
)

FAST: Final[dict[str, Callable[[], str]]] = {
    "flags": reference.flags,
    "delta-send": reference.sender_options,
    "errors": reference.errors,
    "routes": reference.route_table,
    "metrics": reference.metric_table,
    "faults": faults.markdown,
    "golden": golden.markdown,
}
# Runs every receiver on every loader: most of a minute.
SLOW: Final[dict[str, Callable[[], str]]] = {"conformance": conformance.default_table}


def generate(makers: dict[str, Callable[[], str]]) -> Iterator[tuple[Path, str]]:
    """Yield every page with a region that `makers` fills, and its new text; then the OpenAPI file.

    Raises:
        KeyError: a page marks a region that neither `FAST` nor `SLOW` knows.
    """
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if _REGION.search(text):
            yield page, _REGION.sub(lambda match: _filled(match, makers), text)
    yield DOCS / OPENAPI, openapi.document()


def _filled(match: re.Match[str], makers: dict[str, Callable[[], str]]) -> str:
    name = match["name"]
    if name not in makers:
        if name not in FAST and name not in SLOW:
            raise KeyError(f"no table is called {name!r}")
        return match[0]
    return f"{match[1]}\n{makers[name]()}\n\n{match[4]}"
