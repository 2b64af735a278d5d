"""Rewrite the generated tables of docs/, or say which are stale."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from scripts.doc_tables.pages import DOCS, FAST, SLOW, generate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.doc_tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument(
        "--fast", action="store_true", help=f"leave out what takes long: {', '.join(SLOW)}"
    )
    options = parser.parse_args(argv)
    stale = []
    for path, text in generate(FAST if options.fast else {**FAST, **SLOW}):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        name = path.relative_to(DOCS.parent)
        print(f"stale: {name}" if options.check else f"wrote {name}")
    if stale and options.check:
        print("run python -m scripts.doc_tables")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    # What is refused is in the conformance table; the log would say it a thousand times.
    logging.getLogger("engine_ext").setLevel(logging.ERROR)
    sys.exit(main())
