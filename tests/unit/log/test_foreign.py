"""Folders of other trainers in a delta log: with an index in place of ``DONE``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine_ext.cli.log import DAMAGED, OK, main
from engine_ext.errors import LogDamaged
from engine_ext.log import (
    CannotFold,
    fold_versions,
    open_log,
    route,
    verify_version,
)
from engine_ext.log.catalog import DONE
from tests.support.folder_writer import INDEX, write_checkpoint, write_version
from tests.unit.log.test_fold import sparse, write

FILE = "model-00001-of-00002.safetensors"
Tensors = dict[str, torch.Tensor]


def step(number: int) -> Tensors:
    generator = torch.Generator().manual_seed(number)
    return {n: torch.randn((4, 3), generator=generator).bfloat16() for n in ("a", "b", "c")}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Versions 1 to 3 by another trainer (xor, nothing, overwrite), then a whole checkpoint."""
    write_version(tmp_path, 1, step(0), step(1))
    write_version(tmp_path, 2, step(1), step(1))
    write_version(tmp_path, 3, step(1), step(3), encoding="overwrite")
    write_checkpoint(tmp_path, 4, step(4))
    return tmp_path


def test_its_entries(log: Path) -> None:
    listing = open_log(log).listing()
    assert listing.damaged == {}
    found = [(e.version, e.base_version, e.full, e.foreign) for e in listing.entries]
    assert found == [
        (1, 0, False, True),
        (2, 1, False, True),
        (3, 2, False, True),
        (4, None, True, True),
    ]
    first = listing.entries[0]
    assert first.paths == [first.folder]
    assert first.nbytes == sum(p.stat().st_size for p in first.folder.glob("*.safetensors"))
    assert [entry.version for entry in route(listing.entries[:3], 0)] == [1, 2, 3]
    for entry in listing.entries:
        entry.require_files()
        verify_version(entry)


def test_version_that_leads_over_others_is_damaged(log: Path) -> None:
    """A digit of its base has changed: weights between the two would be those of before."""
    index = log / "weight_v000003" / INDEX
    found = json.loads(index.read_text())
    index.write_text(json.dumps(found | {"metadata": {**found["metadata"], "base_version": "1"}}))
    listing = open_log(log).listing()
    why = "its index declares that it leads from 1, over 2"
    assert listing.damaged == {"weight_v000003": why}
    open_log(log).store.delete(["weight_v000002"])
    assert open_log(log).listing().damaged == {}


def test_it_goes_with_versions_of_the_sender(log: Path) -> None:
    write(log, 5, [sparse("a", {1: 7})])
    assert [entry.foreign for entry in open_log(log).listing().entries] == [True] * 4 + [False]


def test_an_empty_end_mark_besides(log: Path) -> None:
    """The index says more."""
    (log / "weight_v000001" / DONE).touch()
    assert open_log(log).listing().entries[0].foreign


def test_a_folder_that_is_still_written(log: Path) -> None:
    (log / "weight_v000003" / INDEX).rename(log / "weight_v000003" / f"{INDEX}.tmp")
    listing = open_log(log).listing()
    assert listing.damaged == {"weight_v000003": f"it has no {DONE}: it was not written completely"}


def test_newest_folder_without_a_mark_is_not_seen(log: Path) -> None:
    """Its trainer is writing it."""
    (log / "weight_v000004" / INDEX).unlink()
    listing = open_log(log).listing()
    assert ([entry.version for entry in listing.entries], listing.newest) == ([1, 2, 3], 3)
    assert listing.damaged == {}
    with open_log(log).writer() as writer:
        assert writer.last_number == 4


@pytest.mark.parametrize("damage", ["index", "file", "more", "version", "cut", "frame"])
def test_what_is_damaged(log: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = log / "weight_v000001"
    data = (folder / FILE).read_bytes()
    if damage == "index":
        (folder / INDEX).write_text("{")
    elif damage == "file":
        (folder / FILE).unlink()
    elif damage == "more":
        (folder / "model-00003-of-00003.safetensors").write_bytes(data)
    elif damage == "version":
        folder.rename(log / "weight_v000011")
    elif damage == "cut":
        (folder / FILE).write_bytes(data[:-1])
    else:
        (folder / FILE).write_bytes(data[:-30] + bytes(30))
    assert main(["verify", str(log)]) == DAMAGED
    assert "weight_v0000" in capsys.readouterr().out
    if damage not in ("cut", "frame"):
        assert len(open_log(log).listing().damaged) == 1
    else:
        with pytest.raises(LogDamaged):
            verify_version(open_log(log).listing().entries[0])


def test_the_command(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(log)]) == OK
    assert main(["verify", str(log)]) == OK
    assert "4 of 4 folder(s) are sound" in capsys.readouterr().out
    assert main(["fold", str(log), "0", "3"]) == DAMAGED
    assert "another trainer" in capsys.readouterr().err
    assert main(["prune", str(log), "--keep", "1", "--base-version", "0"]) == OK
    assert [entry.version for entry in open_log(log).listing().entries] == [4]


def test_it_cannot_be_folded(log: Path) -> None:
    before = sorted(log.iterdir())
    with pytest.raises(CannotFold, match="version 1 is a folder of another trainer"):
        fold_versions(open_log(log), open_log(log).listing().entries[:3], 0)
    assert sorted(log.iterdir()) == before
