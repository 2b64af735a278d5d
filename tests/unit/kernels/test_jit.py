"""Compiled loops, and numba's cache of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import engine_ext
from engine_ext.kernels.jit import array, compile_loop

pytestmark = pytest.mark.slow

SOURCE = """
def total(values):
    found = 0
    for k in range(values.size):
        found += values[k]
    return found
"""


def test_a_cache_that_mixes_signatures_up_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that write it at once can do that: both take the same name for their code."""
    from numba import config, types

    monkeypatch.setattr(config, "CACHE_DIR", "")  # next to the code
    path = tmp_path / "loops_of_a_test.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = "uint8", "uint16"
    signatures = {kind: types.int64(array(types, kind)) for kind in kinds}

    def totals() -> list[int]:
        loops = {kind: compile_loop(module.total, signatures[kind]) for kind in kinds}
        return [loops[kind](np.arange(5, dtype=kind)) for kind in kinds]

    assert totals() == [10, 10]
    first, second = sorted((tmp_path / "__pycache__").glob("*.nbc"))
    aside = tmp_path / "aside"
    os.rename(first, aside)
    os.rename(second, first)
    os.rename(aside, second)
    assert totals() == [10, 10]


LOOP = """
from numba import types
from numba.extending import register_jitable
from engine_ext.ROOM.of_a_test import more
from engine_ext.kernels.jit import compile_loop

register_jitable(more)

def loop(value):
    return more(value)

compiled = compile_loop(loop, types.int64(types.int64))
print(compiled(1), sum(compiled.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("name", ["format", "kernels", "placement"])
def test_a_function_of_another_file_that_changed_is_compiled(tmp_path: Path, name: str) -> None:
    """numba's cache compares only the file of the function that calls it."""
    room = tmp_path / "engine_ext" / name
    shutil.copytree(Path(engine_ext.__file__).parent, room.parent)
    (tmp_path / "loop_of_a_test.py").write_text(LOOP.replace("ROOM", name))
    command = [sys.executable, "-c", "import loop_of_a_test"]

    def run(added: int) -> str:
        (room / "of_a_test.py").write_text(f"def more(value):\n    return value + {added}\n")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert [run(1), run(1), run(2)] == ["2 0", "2 1", "3 0"]


WARMED = """
import os
from pathlib import Path
import numpy as np
from engine_ext.kernels import gather_scatter, table_of, warm_up

cache = Path(os.environ["NUMBA_CACHE_DIR"])
offsets = np.arange(3, dtype=np.int32)
compiled = lambda: len(list(cache.rglob("*.nbc")))

warm_up(2, 4)
counts = [compiled()]
for dtype in np.uint16, np.uint32:
    live, bits = np.zeros(8, dtype), np.ones(3, dtype)
    gather_scatter.swap(live, offsets, bits)
    gather_scatter.swap_checked(live, offsets, bits, gather_scatter.read(live, offsets))
    gather_scatter.write(live, offsets, bits)
    assert gather_scatter.holds(live, offsets, bits)
    table_of([(live, offsets, bits, bits)]).write()
    counts.append(compiled())
print(*counts)
"""


def test_warm_up_compiles_the_loops_of_one_width(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WARMED]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    warmed, used, other_width = map(int, done.stdout.split())
    assert 0 < warmed == used < other_width
