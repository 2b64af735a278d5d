"""The walks of how-it-works name functions that their files define."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from scripts.doc_tables.__main__ import DOCS
from tests.support.cases import in_one_test

ROOT = DOCS.parent
SENDER, RECEIVER = "One changed weight", "One byte of a part"


def steps(heading: str) -> list[tuple[int, str, str]]:
    """Return number, function and file of each row of the table below a heading.

    A file is relative to the folder that the table's head names.
    """
    page = (DOCS / "how-it-works.md").read_text()
    [section] = re.findall(rf"^### {heading}.*?(?=^#|\Z)", page, re.M | re.S)
    folder = "".join(re.findall(r"^\| \| function \| file in `(.+?)` \|", section, re.M))
    rows = re.findall(r"^\| (\d+) \| `(.+?)` \| `(.+?)` \| .+ \|$", section, re.M)
    return [(int(number), name, f"{folder}/{file}".lstrip("/")) for number, name, file in rows]


@cache
def defined(file: str) -> set[str]:
    """Return the names of a file's functions and of its classes' methods."""
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {one.name for one in tree.body if isinstance(one, functions)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            names |= {
                f"{owner.name}.{one.name}" for one in owner.body if isinstance(one, functions)
            }
    return names


@pytest.mark.parametrize(("heading", "most"), [(SENDER, 14), (RECEIVER, 16)])
def test_a_walk_has_few_numbered_steps(heading: str, most: int) -> None:
    numbers = [number for number, *_ in steps(heading)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 10 <= len(numbers) <= most


@in_one_test(
    ("name", "file"),
    [step[1:] for heading in (SENDER, RECEIVER) for step in steps(heading)],
)
def test_the_file_of_a_step_defines_its_function(name: str, file: str) -> None:
    assert name in defined(file)
