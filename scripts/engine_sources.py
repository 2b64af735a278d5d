"""Download a release of an engine and unpack its Python files, without what it needs.

    python -m scripts.engine_sources vllm==0.33.0 FOLDER

For `scripts.compare_engine`, and for tests of a release that has no build for this machine. The
folder is complete, or as it was before. Does nothing if it is there already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux2014_x86_64")


def fetch(requirement: str, folder: Path) -> None:
    """Unpack the ``.py`` and ``.json`` files of a requirement's wheel into a new folder.

    Raises:
        subprocess.CalledProcessError: The wheel could not be downloaded.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        command += ["--abi", "abi3", "--abi", "cp312", "--abi", "none"]
        for platform in (*_PLATFORMS, "any"):
            command += ["--platform", platform]
        subprocess.run([*command, requirement], check=True)
        [wheel] = Path(scratch).glob("*.whl")
        unpacked = Path(scratch, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((".py", ".json", "METADATA", "entry_points.txt")):
                    archive.extract(name, unpacked)
        unpacked.rename(folder)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.engine_sources",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("requirement", help="a release, such as vllm==0.33.0")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    fetch(chosen.requirement, chosen.folder)


if __name__ == "__main__":
    main()
