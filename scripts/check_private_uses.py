"""Check that tests do not use more private attributes than they do now: ``make lint`` runs it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# The number must only fall; whoever makes it fall lowers it here.
MOST_PRIVATE_USES: Final = 283


def private_uses() -> list[str]:
    """Return where tests use an attribute that starts with ``_`` of something but `self` or `cls`.

    Names like ``__x__`` do not count, nor do attributes that the test file itself defines or sets
    on `self`.
    """
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text())
        own = set(_defined(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            if node.attr.endswith("__") or node.attr in own:
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.attr}")
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def main() -> int:
    """Return 1, and print them, if tests use more private attributes than allowed."""
    uses = private_uses()
    if len(uses) <= MOST_PRIVATE_USES:
        return 0
    print("\n".join(uses))
    print(f"tests use {len(uses)} private attributes; {MOST_PRIVATE_USES} at most")
    return 1


if __name__ == "__main__":
    sys.exit(main())
