"""What the sender keeps of a step: in memory up to a limit, then in a file; and what it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_sender import DeltaSender
from delta_sender.diff import spill as sender_spill
from delta_sender.diff.change import Change, Elements
from delta_sender.diff.snapshot import Snapshot
from delta_sender.diff.spill import Spill
from tests.support.descriptors import open_descriptors
from tests.support.fake_engine import Engine, model_of, train

ROOT = Path(__file__).parents[3]


Changes = list[tuple[str, Change]]


def changes_of(encoding: str, density: float) -> Changes:
    model = model_of(torch.bfloat16, torch.float32, torch.int8, numel=1001)
    snapshot = Snapshot(model.items(), encoding)
    train(model, density=density)
    read = [*snapshot.read(model.items())]
    return [(name, change) for name, change in read if change is not None]


def keep_all(spill: Spill, read: Changes) -> Changes:
    return [(name, spill.keep(change)) for name, change in read]


def own_bytes(change: Change) -> int:
    elements = change.decoded()
    arrays = [elements.new, elements.stream]
    arrays += [] if elements.indices is None else [elements.indices, elements.old]
    return sum(array.nbytes for array in arrays if array is not None)


@pytest.mark.parametrize("density", [0.05, 0.9])
@pytest.mark.parametrize("encoding", ["deltas", "gap8_exp"])
def test_what_is_in_a_file_is_the_same(encoding: str, density: float) -> None:
    read = changes_of(encoding, density)
    spill = Spill(0)
    kept = keep_all(spill, read)
    assert spill.spilled >= sum(own_bytes(change) for _, change in read)
    for (name, before), (same_name, after) in zip(read, kept, strict=True):
        assert name == same_name
        assert (after.dtype, after.shape, after.nnz) == (before.dtype, before.shape, before.nnz)
        assert after.digest == before.digest
        for field in ("indices", "old", "new", "stream"):
            was, now = getattr(before.decoded(), field), getattr(after.decoded(), field)
            assert (was is None) == (now is None)
            if was is not None:
                assert (now.dtype, now.tolist()) == (was.dtype, was.tolist())
                assert now.flags.aligned
                assert now.flags.writeable  # as torch wants it
        if before.is_dense:
            assert after.decoded().old is before.decoded().old  # the snapshot's


def test_up_to_the_limit_all_stays_where_it_is() -> None:
    read = changes_of("gap8_exp", 0.05)
    sizes = [own_bytes(change) for _, change in read]
    spill = Spill(sizes[0] + sizes[2])
    assert spill.keep(read[0][1]) is read[0][1]
    in_memory = []
    for _, change in read[1:]:
        before = spill.spilled
        spill.keep(change)
        in_memory.append(spill.spilled == before)
    left, expected = sizes[2], []
    for size in sizes[1:]:
        expected.append(size <= left)
        left -= size if size <= left else 0
    assert in_memory == expected
    assert (spill.spilled > 0) == (False in expected)


def test_what_stays_does_not_keep_in_memory_what_is_in_a_file() -> None:
    """Small tensors that were compared together have common arrays."""
    common = np.arange(100, dtype=np.uint16)
    places = np.arange(100, dtype=np.int32)

    def change(part: slice) -> Change:
        own = common[part]
        return Change("bfloat16", (100,), Elements(places[part], own, own), own.size)

    spill = Spill(100)
    spill.keep(change(slice(0, 90)))
    assert spill.spilled
    small = spill.keep(change(slice(90, 100))).decoded()
    assert small.new.tolist() == [*range(90, 100)]
    assert small.indices is not None
    assert all(array.base is None for array in (small.indices, small.old, small.new))


@pytest.mark.slow
def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_descriptors()
    maps = Path("/proc/self/maps")
    kept = keep_all(Spill(0), changes_of("gap8_exp", 0.05))
    assert maps.read_text().count(str(tmp_path)) == 1 < len(kept)
    assert open_descriptors() == before + 1
    assert [*tmp_path.iterdir()] == []
    kept.clear()
    assert str(tmp_path) not in maps.read_text()
    assert open_descriptors() == before


@pytest.mark.slow
def test_a_file_for_many_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And more of them where they are many, or one is large."""
    read = changes_of("gap8_exp", 0.5)
    sizes = [own_bytes(change) for _, change in read]
    monkeypatch.setattr(sender_spill, "_WINDOW", max(sizes) + 64)
    before = open_descriptors()
    kept = keep_all(Spill(0), read)
    assert 1 < open_descriptors() - before < len(kept)
    monkeypatch.setattr(sender_spill, "_WINDOW", 1)
    kept = keep_all(Spill(0), kept)
    assert open_descriptors() - before == len(kept)
    for (_, change), (_, same) in zip(read, kept, strict=True):
        assert np.array_equal(change.decoded().new, same.decoded().new)


def test_without_room_for_the_file_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    engine = Engine.of(model)
    options: dict[str, Any] = {"client": engine.client(), "changes_in_memory": 0}
    with DeltaSender("http://engine/", model.items(), **options) as sender:
        train(model)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        with pytest.raises(OSError, match=r"`changes_in_memory`.*TMPDIR"):
            sender.sync(model.items())
        assert engine.version == 0
        monkeypatch.undo()
        assert not sender.sync(model.items()).full
    assert engine.holds(model)


_MEMORY = """
import ctypes, threading, time
import torch
from delta_sender.diff import snapshot as sender_snapshot
from scripts.bench.sender import simulated_sender

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) >> 10

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.ended = 0, False
    def run(self):
        while not self.ended:
            self.most = max(self.most, anonymous())
            time.sleep(0.001)

sender_snapshot._AHEAD = 4 << 20
base = {f"w{n}": torch.full((1 << 18,), 1 / 3).bfloat16() for n in range(512)}  # 256 MiB

def change(density, tensors):
    for tensor in [*base.values()][:tensors]:
        bits = tensor.view(torch.int16)
        bits[:: round(1 / density)] += 1

small = {"w": torch.ones(1 << 18, dtype=torch.bfloat16)}
with simulated_sender(small, 1e12, encoding="gap8_exp") as sender:
    small["w"][::2] = 2
    sender.sync(small.items())  # loops are compiled: memory of the process, not of a snapshot

for encoding, density in (("gap8_exp", 0.5), ("gap8_ulp", 1.0)):
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous()
    with simulated_sender(base, 1e12, encoding=encoding, bucket_bytes=4 << 20) as sender:
        snapshot = anonymous() - before
        change(density, 32)
        sender.sync(base.items())  # what is allocated once is there
        change(density, 512)
        before, peak = anonymous(), Peak()
        peak.start()
        (report,) = sender.sync(base.items()).values()
        peak.ended = True
        peak.join()
    print(snapshot, peak.most - before, report.density)
"""


@pytest.mark.full
def test_memory_is_one_snapshot_and_bounded_buffers() -> None:
    """The model has 256 MiB. Its changes take up to 2.25 times that; a quarter of it can stay."""
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "server", "trainer"))
    run = subprocess.run(
        [sys.executable, "-c", _MEMORY],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert [float(density) for _, _, density in rows] == [0.5, 1.0]
    for snapshot, more, _ in rows:  # MiB
        assert 200 <= int(snapshot) <= 256 + 64
        assert int(more) <= 256 // 4 + 64
