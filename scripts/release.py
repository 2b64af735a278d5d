"""Prepare and check a release: the version, and the changelog from the files in ``changes/``.

    python -m scripts.release prepare 0.2.0    # sets the version, moves the fragments
    python -m scripts.release check v0.2.0     # tag, version and changelog agree

``docs/releasing.md`` has all steps.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SECTIONS: Final = ("added", "changed", "deprecated", "removed", "fixed", "security")

_VERSION: Final = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
_VERSION_LINE: Final = re.compile(r'^__version__ = "(.*)"$', re.M)
_UNRELEASED: Final = "## Unreleased"
_NO_FRAGMENT: Final = "README.md"


class NotReady(Exception):
    """The tree cannot be released as it is; the message says why."""


def prepare(root: Path, version: str, today: datetime.date) -> None:
    """Set the version, and give the changelog a heading for it with what ``changes/`` has.

    What stands below "Unreleased" stays in place, below the new heading.

    Raises:
        NotReady: The version is not one, is in the changelog already, or a fragment's name or text
            is wrong. Nothing is changed.
    """
    if not _VERSION.fullmatch(version):
        raise NotReady(f"{version!r} is no version X.Y.Z")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    if _heading(text, version):
        raise NotReady(f"CHANGELOG.md has a section {version} already")
    if _UNRELEASED not in text:
        raise NotReady(f"CHANGELOG.md has no section {_UNRELEASED!r}")
    found = fragments(root / "changes")
    news = "".join(
        f"### {section.capitalize()}\n\n" + "\n".join(items) + "\n\n"
        for section in SECTIONS
        if (items := [said for _, said in found.get(section, [])])
    )
    heading = f"{_UNRELEASED}\n\n## {version} ({today.isoformat()})\n\n{news}".rstrip()
    module = root / "engine_ext" / "__init__.py"
    source, count = _VERSION_LINE.subn(f'__version__ = "{version}"', module.read_text())
    if count != 1:
        raise NotReady(f"{module} has no line __version__ = ...")
    module.write_text(source)
    changelog.write_text(text.replace(_UNRELEASED, heading, 1))
    for path, _ in (one for several in found.values() for one in several):
        path.unlink()


def fragments(folder: Path) -> dict[str, list[tuple[Path, str]]]:
    """Return path and text of each fragment, by section, in the order of their names.

    Raises:
        NotReady: A file's name or text is not that of a fragment.
    """
    found: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(folder.glob("*")):
        if path.name == _NO_FRAGMENT:
            continue
        parts = path.name.split(".")
        if len(parts) != 3 or parts[1] not in SECTIONS or parts[2] != "md":
            raise NotReady(f"{path.name}: a fragment is called NAME.SECTION.md; {SECTIONS}")
        said = path.read_text().strip()
        if not said.startswith("- "):
            raise NotReady(f'{path.name}: a fragment is a list, whose items begin with "- "')
        found.setdefault(parts[1], []).append((path, said))
    return found


def check(root: Path, tag: str) -> None:
    """Check that a tag, the version and the changelog agree, and that no fragment is left.

    Raises:
        NotReady: They do not.
    """
    match = _VERSION_LINE.search((root / "engine_ext" / "__init__.py").read_text())
    version = match[1] if match else None
    if tag != f"v{version}":
        raise NotReady(f"the tag is {tag}, the version {version}")
    if not _heading((root / "CHANGELOG.md").read_text(), version or ""):
        raise NotReady(f"CHANGELOG.md has no section {version}")
    left = [path.name for several in fragments(root / "changes").values() for path, _ in several]
    if left:
        raise NotReady(f"not in the changelog yet: {', '.join(left)}")


def _heading(changelog: str, version: str) -> re.Match[str] | None:
    return re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("version", metavar="X.Y.Z")
    commands.add_parser("check").add_argument("tag", metavar="vX.Y.Z")
    options = parser.parse_args(argv)
    try:
        if options.command == "prepare":
            prepare(ROOT, options.version, datetime.datetime.now(tz=datetime.timezone.utc).date())
        else:
            check(ROOT, options.tag)
    except NotReady as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
