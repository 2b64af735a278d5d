"""The tools that show what a redesign has not changed, each run once on something small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine_ext.conformance.receivers import Project
from engine_ext.conformance.syncs import syncs_of
from engine_ext.conformance.toy_models import PlainCopy, ReadsValue
from scripts import check_words, count_road, mutate, trace_part
from scripts.freeze import bodies, recording, writes
from tests.conformance import written

SOURCE = """
class Box:
    def holds(self, size):
        if size < 3 and size != 2:
            return size + 1
        self.full = True
"""


@pytest.mark.slow
def test_bodies_are_the_same_in_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, name = str(tmp_path / "bodies.json"), "DeltaSender gap8_ulp"
    assert bodies.main(["--only", name, "--json", stored]) == 0
    assert bodies.main(["--only", name, "--compare", stored]) == 0
    found = json.loads(Path(stored).read_text())
    found[name][0]["sha256"] = "0"
    Path(stored).write_text(json.dumps(found))
    assert bodies.main(["--only", name, "--compare", stored]) == 1
    assert f"/{name}/0/sha256: '0' became" in capsys.readouterr().out


def test_changes_name_every_tensor_that_differs() -> None:
    tensors = {"same": torch.arange(4), "other": torch.arange(4), "shaped": torch.zeros(2)}
    before = recording.memory_of(tensors)
    tensors["other"][2] = 9
    tensors["shaped"] = torch.zeros(3)
    found = recording.changes(before, recording.memory_of({**tensors, "more": torch.zeros(1)}))
    assert found.keys() == {"other", "shaped", "more"}
    assert found["other"]["count"] == 1
    assert found["more"] == "new"


def test_toy_writes_are_equal_for_all_encodings() -> None:
    setup = (PlainCopy,)
    sync = syncs_of(setup)[1]
    every = [written.written(setup, sync, Project("scatter", e)) for e in written.ENCODINGS]
    assert every[0]
    assert every == every[:1] * len(every)


def test_toy_refusals_are_recorded() -> None:
    setup = (ReadsValue,)
    found = written.written(setup, syncs_of(setup)[0], Project("scatter"))
    assert "refused" in str(found) or "not served" in str(found)


def test_live_recorders_cover_both_rank_counts() -> None:
    names = writes.recorders().keys()
    assert {f"qwen3_moe tp{tp}" for tp in (1, 2)} <= names
    assert len(writes.MODELS) == 6


def test_mutants_are_found_again_by_name(tmp_path: Path) -> None:
    file = tmp_path / "box.py"
    file.write_text(SOURCE)
    found = list(mutate.mutants_of(file, tmp_path))
    assert {m.kind for m in found} >= {"compare", "and/or", "arithmetic", "return", "delete"}
    moved = tmp_path / "moved.py"
    file.rename(moved)
    for mutant in found:
        assert mutate.find(mutant, [moved]) == moved
        changed = mutate.mutated(SOURCE, mutant)
        assert changed is not None
        compile(changed, "moved.py", "exec")


@pytest.mark.parametrize("room", mutate.ROOMS)
def test_folders_of_mutated_room_exist(room: str) -> None:
    packages, tests = mutate.ROOMS[room]
    for folder in packages:
        assert list((mutate.ROOT / folder).rglob("*.py")), folder
    for folder in tests:
        assert list((mutate.ROOT / folder).rglob("test_*.py")), folder


def test_room_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tests in tests/nothing"):
        mutate.Scratch(tmp_path, ["tests/nothing"], cpu_s=1)


@pytest.mark.slow
def test_traced_way_ends_in_the_live_weight() -> None:
    way, body = trace_part.sent()
    assert way.hops[-1][0].endswith("http_client.py")
    received = trace_part.received(body)
    assert len(received.hops) > len(received.files) > 1
    assert received.hashes >= 1
    assert received.header_parses >= 1


@pytest.mark.slow
def test_counts_have_every_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = check_words.tracked()[:5]  # `make lint` reads them all, and checks what must not grow
    monkeypatch.setattr(check_words, "tracked", lambda: some)
    assert count_road.main(["--static"]) == 0
    printed = capsys.readouterr().out
    assert "rank operations" in printed
    assert "words to avoid" in printed
