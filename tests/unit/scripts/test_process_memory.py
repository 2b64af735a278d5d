"""Memory counts pages that no file backs; and the peak, which can be reset."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from scripts.process_memory import peak_resident, reset_peak, unmapped_bytes

SIZE = 64 << 20
SLACK = 8 << 20


def touched(flags: int, descriptor: int = -1) -> mmap.mmap:
    memory = mmap.mmap(descriptor, SIZE, flags)
    memory.write(bytes(SIZE) if descriptor < 0 else b"\1" * SIZE)
    return memory


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_memory_without_a_file_counts(flags: int) -> None:
    before = unmapped_bytes(os.getpid())
    with touched(flags | mmap.MAP_ANONYMOUS):
        assert unmapped_bytes(os.getpid()) - before == pytest.approx(SIZE, abs=SLACK)


def test_a_mapped_file_does_not_count(tmp_path: Path) -> None:
    before = unmapped_bytes(os.getpid())
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(SIZE)
        with touched(mmap.MAP_SHARED, file.fileno()):
            assert abs(unmapped_bytes(os.getpid()) - before) < SLACK


def test_a_process_that_is_gone_has_none() -> None:
    with pytest.raises(OSError, match="No such"):
        unmapped_bytes(2**22 + 1)


def test_the_peak_is_of_the_time_since_its_reset() -> None:
    touched(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    before = reset_peak()
    assert peak_resident() - before < SLACK
    touched(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    assert peak_resident() - before > SIZE - SLACK
