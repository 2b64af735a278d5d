"""Rewrite the generated tables of docs/ and the README, or say which are stale."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.doc_tables import conformance, golden, gpu, openapi, reference, support, survey

README: Final = Path(__file__).resolve().parents[2] / "README.md"
DOCS: Final = README.parent / "docs"
_REGION: Final = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /generated -->)", re.DOTALL
)
FAST: Final[dict[str, Callable[[], str]]] = {
    "flags": reference.flags,
    "tuning": reference.tuning,
    "delta-send": reference.sender_options,
    "errors": reference.errors,
    "routes": reference.route_table,
    "metrics": reference.metric_table,
    "faults": reference.fault_table,
    "golden": golden.markdown,
    "supported": support.supported,
    "refused": support.refused,
    "versions": support.versions,
    "features": support.features,
    "survey": survey.stored_table,
    "hardware": gpu.hardware,
    "gpu": gpu.rows,
    "gpu-not-run": gpu.not_run,
    "gpu-syncs": gpu.syncs,
    "gpu-compared": gpu.compared,
}
# Runs every receiver on every loader: most of a minute.
SLOW: Final[dict[str, Callable[[], str]]] = {"conformance": conformance.default_table}


def generate(makers: dict[str, Callable[[], str]]) -> Iterator[tuple[Path, str]]:
    """Yield every page with a region that `makers` fills, and its new text; then the OpenAPI file.

    Raises:
        KeyError: a page marks a region that neither `FAST` nor `SLOW` knows.
    """

    def filled(match: re.Match[str]) -> str:
        name = match["name"]
        if name in makers:
            return f"{match[1]}\n{makers[name]()}\n\n{match[4]}"
        if name not in FAST and name not in SLOW:
            raise KeyError(f"no table is called {name!r}")
        return match[0]

    for page in (README, *sorted(DOCS.rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if _REGION.search(text):
            yield page, _REGION.sub(filled, text)
    yield DOCS / "openapi.json", openapi.document()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.doc_tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    fast_help = f"leave out what takes long: {', '.join(SLOW)}"
    parser.add_argument("--fast", action="store_true", help=fast_help)
    options = parser.parse_args(argv)
    stale = False
    for path, text in generate(FAST if options.fast else {**FAST, **SLOW}):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale = True
        if not options.check:
            path.write_text(text, encoding="utf-8")
        print("stale:" if options.check else "wrote", os.path.relpath(path, README.parent))
    if stale and options.check:
        print("run python -m scripts.doc_tables")
    return int(stale and options.check)


if __name__ == "__main__":
    # The conformance table shows refusals; the log would repeat them a thousand times.
    logging.getLogger("engine_ext").setLevel(logging.ERROR)
    sys.exit(main())
