"""Let processes import one tree of the product, and an engine from a bundle.

Only the standard library: nothing else is there before the bundle is unpacked.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from scripts.gpu.bundle import pieces

REHEARSAL: Final = "GPU_ROWS_ON_CPU"  # set to 1 if the engines run on a CPU
SPENT: Final = "GPU_ROWS_SPENT_S"  # seconds that unpacking took, for the process that follows
_ROOT: Final = Path(__file__).resolve().parents[2]
_POINTS: Final = """\
[vllm.general_plugins]
delta_updates = engine_ext.adapters.vllm.plugin:register

[sglang.srt.plugins]
delta_updates = engine_ext.adapters.sglang.plugin:register
"""


def work_folder(room: int, memory: Path = Path("/dev/shm")) -> Path:
    """Return a folder for what a run needs: in memory if that has the room and runs programs."""
    with contextlib.suppress(OSError):
        if (memory / "gpu-rows" / "site").exists():  # it was chosen before
            return memory / "gpu-rows"
        facts = os.statvfs(memory)
        if facts.f_bavail * facts.f_frsize >= room and not facts.f_flag & os.ST_NOEXEC:
            return memory / "gpu-rows"
    return Path(tempfile.gettempdir()) / "gpu-rows"


def restart_in_bundle(bundle: Path, site: Path, started: float) -> None:
    """Unpack a bundle and run this command anew with what is in it; does not return.

    Args:
        site: where to unpack it; also the engines' caches are there.
        started: of the monotonic clock.
    """
    count = pieces.unpack(bundle, site / "packages")
    # All engines would compile the same files at once, or each anew if Python writes none.
    compileall.compile_dir(site / "packages", quiet=2, workers=0)
    print(f"unpacked {count} archives in {time.monotonic() - started:.1f} s", flush=True)
    given, at = sys.argv[1:], [n for n, one in enumerate(sys.argv[1:]) if one == "--bundle"]
    rest = [one for n, one in enumerate(given) if n not in {*at, *(n + 1 for n in at)}]
    rest = [one for one in rest if not one.startswith("--bundle=")]
    rest += ["--folder", str(site.parent)]
    os.environ.update(
        PYTHONPATH=os.pathsep.join([str(site / "packages"), os.environ.get("PYTHONPATH", "")]),
        NUMBA_CACHE_DIR=str(site / "numba"),
        TRITON_CACHE_DIR=str(site / "triton"),
        HF_HUB_OFFLINE="1",
        **{SPENT: str(time.monotonic() - started)},
    )
    os.execv(sys.executable, [sys.executable, "-m", "scripts.gpu", *rest])


def environment(tree: Path | None, folder: Path) -> dict[str, str]:
    """Return the environment of a process that imports the product from a tree.

    Its ``scripts`` are this checkout's all the same, and the engines find the product by its entry
    points, whether it is installed or not.

    Args:
        tree: None for this checkout.
        folder: for the entry points.
    """
    root = (tree or _ROOT).resolve()
    links = folder / ("points-base" if tree else "points")
    points = links / "delta_updates-0.dist-info"
    points.mkdir(parents=True, exist_ok=True)
    metadata = "Metadata-Version: 2.1\nName: delta-updates\nVersion: 0\n"
    (points / "METADATA").write_text(metadata, encoding="utf-8")
    (points / "entry_points.txt").write_text(_POINTS, encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # rows begin side by side
        (links / "scripts").symlink_to(_ROOT / "scripts")
    paths = [links, root, root / "server", root / "trainer"]
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *before]),
        "PYTHONSAFEPATH": "1",  # the current folder is this checkout, not the tree
    }
