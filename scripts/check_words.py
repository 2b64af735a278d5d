"""Check the words of code, messages, tests and docs: plain technical English.

    python -m scripts.check_words [PATH ...]

Reads docstrings, comments and texts of Python files, Markdown outside of code, and the comments of
settings, scripts and programs in other languages. Prints each place as
``file:line: "phrase": what to write``, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

_START = r"(?:\A|(?<=[.:!?]\s)|(?<=\n\n))\s*(?:[-*]\s+|\d\.\s+)?"
_MAY = r"\bmay\b|(?<!\d )\bMay\b(?! \d)"  # the month has a number next to it

RULES: Final = [
    (re.compile(r"\bbeside\b", re.I), 'write "next to" or "while"'),
    (re.compile(r"\b(?:tells?|told|untold|telling)\b", re.I), 'write "report", "show" or "notify"'),
    (re.compile(r"\bof which\b", re.I), "make two sentences of it"),
    (re.compile(r"\bis none of\b", re.I), 'write "is not one of"'),
    (re.compile(r"\blies?\b", re.I), 'write "is"'),
    (re.compile(r"\bby itself\b", re.I), 'write "automatically", or leave it out'),
    (re.compile(r"\b(?:goes|go|went|going) on\b", re.I), 'write "continue"'),
    (re.compile(_START + r"Of (?!the )[^.\n]*"), "begin with the subject"),
    (re.compile(_START + r"What [^.?]*\b(?:is|are|was|were)\b[^?]*?\."), "begin with the subject"),
    (re.compile(_MAY), 'write "can", "might" or "must not"'),
]
"""Phrases, and what to write in their place."""

ALLOWED: Final = {
    "a reward is a number that tells a policy how well it did, and a policy learns from it",
    "The trainer sends what changed, the engine writes it, and generation goes on.",
}
"""Whole texts that are data: sentences that a tokenizer is trained on."""

_READ: Final = (
    "*.py",
    "*.md",
    "*.toml",
    "*.yml",
    "*.js",
    "*.css",
    "*.sh",
    "Makefile",
    "*Dockerfile",
)
_COMMENT = re.compile(r"(?:^|\s)(?:#+|//+|/\*+|^\s*\*)\s+(.*)")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.M | re.S)
_CODE = re.compile(r"``.+?``|`[^`\n]+`|\]\([^)]*\)|https?://\S+", re.S)


def check(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, phrase and advice for each phrase of a file that a rule finds."""
    read = {".md": _markdown, ".py": _python}.get(path.suffix, _commented)
    for line, prose in read(path.read_text()):
        plain = _CODE.sub(lambda code: re.sub(r"[^\n]", "_", code.group()), prose)
        for rule, advice in RULES:
            for match in rule.finditer(plain):
                found = match.group().strip()
                start = match.end() - len(match.group().lstrip())
                yield line + plain.count("\n", 0, start), " ".join(found.split())[:60], advice


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    blank = _FENCE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
    yield 1, re.sub(r"^<!-- .*? -->$", "", blank, flags=re.M)


def _python(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment, docstring and other text of several words."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if " " in node.value and node.value not in ALLOWED:
            yield node.lineno, node.value
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from _blocks(
        (token.start[0], token.string.lstrip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
    )


def _commented(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment: what follows ``#`` or ``//``, or a line with ``*``."""
    found = ((number, _COMMENT.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return _blocks((number, match[1]) for number, match in found if match)


def _blocks(comments: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of comments on lines that follow each other."""
    block: list[str] = []
    first = last = 0
    for line, comment in comments:
        if block and line == last + 1:
            block.append(comment)
        else:
            if block:
                yield first, "\n".join(block)
            block, first = [comment], line
        last = line
    if block:
        yield first, "\n".join(block)


def tracked(paths: Sequence[str] = ()) -> list[Path]:
    """Return the files in git below `paths` that have words; without paths, all."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *(paths or _READ)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    own = Path(__file__).relative_to(ROOT).as_posix()
    return [
        ROOT / name
        for name in listed.stdout.split("\0")
        if any(fnmatch.fnmatch(name, one) for one in _READ)
        and name not in {own, "CHANGELOG.md"}
        and (ROOT / name).is_file()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or folders; without: all in git")
    count = 0
    for path in tracked(parser.parse_args(arguments).paths):
        for line, phrase, advice in check(path):
            count += 1
            print(f'{path.relative_to(ROOT)}:{line}: "{phrase}": {advice}')
    if count:
        print(f"check_words: {count} phrases to rewrite", file=sys.stderr)
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
