"""The page of numbers has a command and a result file for each table, and what others cite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from scripts.doc_tables.__main__ import DOCS
from tests.support.cases import in_one_test

ROOT = DOCS.parent
RESULTS = ROOT / "scripts/bench/results"
PAGE = (DOCS / "numbers.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
# Generated tables are made from their files.
MEASURED = [n for n, t in SECTIONS.items() if "\n| --- |" in t and "<!-- generated" not in t]

_FIGURE = re.compile(r"(?<![\w.])\d[\d,]*\d(?:\.\d+)?|\d+(?:\.\d+)?")


def figures(texts: Iterable[str]) -> set[str]:
    return {figure.replace(",", "") for text in texts for figure in _FIGURE.findall(text)}


def cells(text: str) -> Iterator[str]:
    """Yield the figures' cells of all tables: of every row below its head but the first."""
    for row in re.findall(r"^\| (.+) \|$", text, re.M):
        yield from row.split(" | ")[1:]


def bodies(text: str) -> str:
    """Return the text without the heads of its tables."""
    return re.sub(r"^\|.+\n(?=\| ---)", "", text, flags=re.M)


@in_one_test("module", sorted(set(re.findall(r"scripts\.[\w.]*\w", PAGE))))
def test_a_command_of_the_page_is_a_module(module: str) -> None:
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@in_one_test("section", MEASURED)
def test_the_figures_of_a_table_are_measured(section: str) -> None:
    text = SECTIONS[section]
    names = re.findall(r"scripts\.bench\.(\w+)|`(\w+)\.json`", text)
    files = [RESULTS / f"{script or file}.json" for script, file in names]
    assert files
    found = figures(file.read_text() for file in files)
    assert figures(cells(bodies(text))) - found == set()


@pytest.mark.parametrize(
    ("page", "heading"),
    [("README.md", "## Performance"), ("docs/wire-format.md", "### Size")],
)
def test_a_figure_that_a_page_cites_is_in_the_numbers(page: str, heading: str) -> None:
    section = re.split(rf"^{heading}\n", (ROOT / page).read_text(), flags=re.M)[1]
    cited = figures(cells(bodies(re.split(r"^##", section, flags=re.M)[0])))
    known = {float(figure) for figure in figures([PAGE])}
    for figure in cited:
        digits = len(figure.partition(".")[2])
        assert float(figure) in {round(number, digits) for number in known}, figure
