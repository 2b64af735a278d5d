"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; pipes in cells are escaped."""
    lines = [_row(header), _row(["---"] * len(header)), *map(_row, rows)]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return text that Markdown shows as it is, other than between backticks."""
    return text.replace("<", "&lt;")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring on one line, without its full stop."""
    paragraph = (documented.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.replace("``", "`").split()).removesuffix(".")
