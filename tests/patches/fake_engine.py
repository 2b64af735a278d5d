"""A small source tree that stands in for an engine, and patches for it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from scripts.apply_patches import PatchSet

# The tool on this engine: options to its exit status and all that it wrote.
Tool = Callable[..., tuple[int, str]]

VERSION = "1.2.3"
FILES = {
    "vllm/__init__.py": "",
    "vllm/version.py": f'__version__ = "{VERSION}"\n',
    "vllm/one.py": "".join(f"one = {k}\n" for k in range(20)),
    "vllm/deep/two.py": "".join(f"two = {k}\n" for k in range(20)),
    "vllm/deep/three.py": "import os\r\n\r\nthree = 3\r\n",
}
EDITS = {
    "0001-first.patch": {
        "vllm/one.py": ("one = 3\n", "one = 3\nhook()\n"),
        "vllm/deep/three.py": ("three = 3\r\n", "three = 33\r\n"),
    },
    "0002-second.patch": {
        "vllm/one.py": ("one = 15\n", ""),
        "vllm/deep/two.py": ("two = 10\n", "two = 1\ntwo = 0\n"),
    },
}


def write_source(folder: Path) -> None:
    """The engine as it was released."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())


def patched_source() -> dict[str, str]:
    """The text of every file after all patches."""
    texts = dict(FILES)
    for edits in EDITS.values():
        for path, (old, new) in edits.items():
            texts[path] = texts[path].replace(old, new)
    return texts


PATCHED = patched_source()


def set_version(source: Path, version: str) -> dict[str, str]:
    """Give the engine another version; every file of a released engine of that version."""
    text = f'__version__ = version = "{version}"\n'
    (source / "vllm" / "version.py").write_text(text)
    return {**FILES, "vllm/version.py": text}


def write_patches(folder: Path, source: Path) -> None:
    """The numbered patches, the last one the version's own, and their manifest."""
    folder.mkdir(parents=True)
    texts = dict(FILES)
    for name, edits in EDITS.items():
        lines = [f"What {name} is for.\n", "\n"]
        for path, (old, new) in edits.items():
            before, texts[path] = texts[path], texts[path].replace(old, new)
            lines += difflib.unified_diff(
                before.splitlines(keepends=True),
                texts[path].splitlines(keepends=True),
                f"a/{path}",
                f"b/{path}",
                n=1,
            )
        own = folder if name == max(EDITS) else folder.parent
        (own / name).write_bytes("".join(lines).encode())
    PatchSet(folder, source, by_hash=False).write_manifest()


def read(folder: Path) -> dict[str, str]:
    """The text of every file in the folder of a tree, also of files that are not part of it."""
    return {
        str(file.relative_to(folder)): file.read_bytes().decode()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
