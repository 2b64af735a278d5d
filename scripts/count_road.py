"""Count how long the way of a weight is, and how large the tree: one row for each figure.

python -m scripts.count_road            every row, with its definition
python -m scripts.count_road --ways     and every function on the two ways
python -m scripts.count_road --check    only what must not grow; exit 1 if it has
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from scripts import check_words

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("engine_ext", "server/delta_server", "trainer/delta_sender")
# The number must only fall; whoever makes it fall lowers it here.
MOST_PRIVATE_USES: Final = 289
_SMALL: Final = 60  # lines
# What an engine's own API brings a version by, as FILE:NAME. Every other way in is a class in
# `sources/` that has `settled`: `Coordinator.submit` has no other caller.
WAYS_IN: Final = {
    "vLLM's transfer back end": "engine_ext/adapters/vllm/transfer_group.py:",
    "SGLang's RPC names": "engine_ext/adapters/sglang/rpc.py:",
}
# Each turns new values into staged writes of its own. The masked apply does not: it stages as the
# scatter does, and writes through the engine's loader.
STAGING_PATHS: Final = {
    "elements, by pieces": "engine_ext/sync/stager.py:_find_elements",
    "whole boxes": "engine_ext/sync/stager.py:_box",
    "sparse params, by rows of the host table": "engine_ext/sync/host_table.py:HostTable",
    "elements, on the device": "engine_ext/sync/device_table.py:gather",
    "gaps, by rows of the stream table": "engine_ext/sync/stream_table.py:StreamTable",
}
Row = tuple[str, object, str]


def files(*folders: str, kind: str = "*.py") -> list[Path]:
    """Return the files of some folders."""
    return [file for one in folders for file in sorted((ROOT / one).rglob(kind))]


def lines(*folders: str) -> int:
    """Return how many lines the Python files have."""
    return sum(len(file.read_text().splitlines()) for file in files(*folders))


def small_files() -> list[Path]:
    """Return the product's short files that are no ``__init__``."""
    return [
        file
        for file in files(*PRODUCT)
        if not file.name.startswith("__") and len(file.read_text().splitlines()) < _SMALL
    ]


def private_uses() -> list[str]:
    """Return where tests use an attribute that starts with ``_`` of something but `self` or `cls`.

    Names like ``__x__`` do not count, nor do attributes that the test file itself defines or sets
    on `self`.
    """
    found = []
    for file in files("tests"):
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


def is_there(place: str) -> bool:
    """Return whether FILE:NAME is in the tree; without a name, whether the file is."""
    file, _, name = place.partition(":")
    path = ROOT / file
    if not path.is_file():
        return False
    return not name or re.search(rf"(?:def|class) {name}\b", path.read_text()) is not None


def present(places: dict[str, str]) -> list[str]:
    """Return the names of what is still there."""
    return [name for name, place in places.items() if is_there(place)]


def classes(folders: Iterable[str], wanted: Callable[[ast.ClassDef], bool]) -> list[str]:
    """Return the names of the classes that a predicate takes."""
    trees = (ast.parse(file.read_text()) for file in files(*folders))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return sorted(node.name for node in nodes if isinstance(node, ast.ClassDef) and wanted(node))


def operations() -> list[str]:
    """Return the rank operations: subclasses of ``Operation[...]``."""

    def wanted(node: ast.ClassDef) -> bool:
        return any(ast.unparse(base).startswith("Operation[") for base in node.bases)

    return classes(["engine_ext"], wanted)


def sources() -> list[str]:
    """Return the classes of ``sources/`` that have a method `settled`."""

    def wanted(node: ast.ClassDef) -> bool:
        names = [one.name for one in node.body if hasattr(one, "name")]
        bases = [ast.unparse(base) for base in node.bases]
        return "settled" in names and "Protocol" not in bases

    return classes(["server/delta_server/sources"], wanted)


def flags() -> list[str]:
    """Return the engine's flags, ``--enable-delta-updates`` not among them."""
    text = (ROOT / "engine_ext/settings.py").read_text()
    return sorted(set(re.findall(r'^ +"(--delta-[a-z-]+)', text, re.M)))


def words() -> int:
    """Return the number of phrases that `scripts.check_words` would have rewritten."""
    return sum(1 for path in check_words.tracked() for _ in check_words.check(path))


def traced_rows(*, with_ways: bool) -> Iterator[Row]:
    """Yield the rows of the two ways."""
    from scripts import trace_part

    way, body = trace_part.sent()
    received = trace_part.received(body)
    what = "functions that take or return the changed weight (scripts/trace_part.py)"
    for name, one in (("HTTP endpoint to live weight", received), ("tensor to HTTP client", way)):
        yield f"hops, {name}", len(one.hops), what
        yield f"files, {name}", len(one.files), "of these functions"
        yield f"revisits, {name}", one.revisits, "times the way enters a room that it had left"
        if with_ways:
            for file, function in one.hops:
                yield "", f"{file} {function}", ""
    what = "hashes that read the changed weight (xxhash, sha256), from the endpoint on"
    yield "hash passes over a part", received.hashes, what
    what = "JSON decoded that has __metadata__, from the endpoint on"
    yield "header parses of a part", received.header_parses, what


def static_rows() -> Iterator[Row]:
    """Yield the rows that are counted in the sources."""
    ways = [*present(WAYS_IN), *sources()]
    yield "ways in", len(ways), f"WAYS_IN, and sources: {', '.join(ways)}"
    yield "rank operations", len(operations()), "subclasses of Operation[...] in engine_ext"
    paths = present(STAGING_PATHS)
    yield "code paths that stage a tensor", len(paths), f"STAGING_PATHS: {', '.join(paths)}"
    yield "engine flags", len(flags()), "--delta-... in engine_ext/settings.py"
    yield "lines, product", lines(*PRODUCT), "of engine_ext, delta_server and delta_sender"
    yield "lines, scripts", lines("scripts"), ""
    yield "lines, tests", lines("tests"), ""
    yield "small files", len(small_files()), f"of the product, under {_SMALL} lines, no __init__"
    uses = len(private_uses())
    yield "private attributes in tests", uses, f"see private_uses; at most {MOST_PRIVATE_USES}"
    yield "words to avoid", words(), "python -m scripts.check_words"


def check() -> int:
    """Return 1, and print them, if tests use more private attributes than allowed."""
    uses = private_uses()
    if len(uses) <= MOST_PRIVATE_USES:
        return 0
    print("\n".join(uses))
    print(f"tests use {len(uses)} private attributes; {MOST_PRIVATE_USES} at most")
    return 1


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="scripts.count_road", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ways", action="store_true", help="list the functions on the two ways")
    parser.add_argument("--check", action="store_true", help="only what must not grow")
    parser.add_argument("--static", action="store_true", help="run nothing, only read the sources")
    arguments: Any = parser.parse_args(given)
    if arguments.check:
        return check()
    rows = list(static_rows())
    if not arguments.static:
        rows = [*traced_rows(with_ways=arguments.ways), *rows]
    for name, value, definition in rows:
        print(f"{name:36}{value!s:>8}  {definition}" if name else f"    {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
