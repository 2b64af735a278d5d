"""The command ``delta-log audit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_ext.audit import AuditFile
from engine_ext.cli.audit import digest_of
from engine_ext.cli.log import DAMAGED, OK, USAGE, main
from engine_ext.format.digest import tensor_digest
from engine_ext.log import open_log
from engine_ext.settings import HMAC_KEY_ENVIRONMENT
from tests.unit.audit.test_audit_file import KEY, digest, record
from tests.unit.audit.test_log_chain import write


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    for version in (1, 2, 3):
        write(open_log(folder), version)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    facts: dict[str, Any] = {"engine": "vllm", "host": "gpu-3", "pid": 7, "run": "r"}
    versions = [record(version, **facts) for version in (1, 2, 3)]
    AuditFile(path, KEY).append([record(0, "loaded", engine="vllm"), *versions])
    return path


def audit(*arguments: object) -> int:
    return main(["audit", *map(str, arguments)])


def test_log_and_file_prove_a_version(
    log: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, KEY)
    assert audit(log, file, "--to", 3, "--digest", digest(0)) == OK
    out = capsys.readouterr().out
    assert f"version 3 ({digest(3)}) follows from version 0 ({digest(0)}) by 3 record(s)" in out
    assert "7 signature(s) verified" in out
    assert "vllm gpu-3:7" in out
    assert audit(file, "--digest", digest(0), "--json") == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["proven"], found["signed"]) == (3, True, 4)
    assert [one["version"] for one in found["records"]] == [1, 2, 3]
    assert found["records"][0]["committed"][0]["engine"] == "vllm gpu-3:7"


def test_without_key_it_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(log) == OK
    assert "signatures were not verified" in capsys.readouterr().out


def test_output_says_that_no_part_was_read(
    log: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(log) == OK
    assert "the parts in the log were not read" in capsys.readouterr().out
    assert audit(file) == OK
    assert "parts" not in capsys.readouterr().out


@pytest.mark.parametrize("trail", ["log", "file"])
def test_another_checkpoint_is_not_proven(
    trail: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    found = request.getfixturevalue(trail)
    assert audit(found, "--digest", "e" * 32) == DAMAGED
    out, err = capsys.readouterr()
    assert "gap: " in out
    assert err == "version 3 is not proven\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--to", "0"], DAMAGED),
        (["--to", "0", "--digest", digest(0)], OK),
        (["--base-version", "2", "--to", "2", "--digest", "e" * 32], DAMAGED),
    ],
)
def test_the_checkpoints_version_is_proven_by_its_digest(
    log: Path, arguments: list[str], status: int
) -> None:
    assert audit(log, *arguments) == status


@pytest.mark.parametrize("trail", ["log", "file"])
def test_unknown_version_is_a_gap(
    trail: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(request.getfixturevalue(trail), "--to", 9) == DAMAGED
    assert "gap: no record leads to version 9" in capsys.readouterr().out


def test_engine_with_other_bytes_is_a_fork(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.jsonl"
    AuditFile(path, None).append([record(0, "loaded"), record(1, run="r", digest="e" * 32)])
    assert audit(log, path) == DAMAGED
    assert "fork: version 1 has the digest" in capsys.readouterr().out


def test_unknown_weights_are_not_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "audit.jsonl"
    facts: dict[str, Any] = {"base_version": 1, "digest_before": digest(1), "digest": None}
    found = record(1, "found", changed_by="/load_weights", **facts)
    AuditFile(path, None).append([record(0, "loaded"), record(1, run="r"), found])
    assert audit(path) == DAMAGED
    assert "gap: audit.jsonl:3: /load_weights changed the weights" in capsys.readouterr().out
    assert audit(path, "--json") == DAMAGED
    shown = json.loads(capsys.readouterr().out)
    assert (shown["digest"], shown["proven"]) == (None, False)
    assert audit(path, "--to", 0) == OK


def test_a_loaded_model_without_digest_is_not_proven(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditFile(path, None).append([record(0, "loaded", digest=None)])
    assert audit(path, "--to", 0) == DAMAGED


def engine_file(path: Path, *, run: str | None, end: str, start: str = digest(0)) -> Path:
    """The file of an engine that has reached version 3."""
    steps = [
        record(1, run=run, digest_before=start),
        record(2, run=run),
        record(3, run=run, digest=end),
    ]
    AuditFile(path, None).append([record(0, "loaded", digest=start), *steps])
    return path


def test_engine_of_another_run_contradicts_a_log(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_file(tmp_path / "engine.jsonl", run="another", end="e" * 32)
    assert audit(log, engine, "--to", 3, "--digest", digest(0)) == DAMAGED
    fork = f"fork: version 3 has the digest {digest(3)} in weight_v000003, and {'e' * 32} in"
    assert f"{fork} engine.jsonl:4" in capsys.readouterr().out


@pytest.mark.parametrize("order", [("one", "other"), ("other", "one")])
def test_engines_that_differ_are_a_fork(
    order: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_file(tmp_path / "one", run=None, end=digest(3))
    engine_file(tmp_path / "other", run=None, end="e" * 32)
    assert audit(*(tmp_path / name for name in order)) == DAMAGED
    assert "fork: version 3 has the digest" in capsys.readouterr().out


def test_engine_with_another_start_is_a_gap(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_file(tmp_path / "engine.jsonl", run="r", end=digest(3), start="e" * 32)
    assert audit(log, engine, "--digest", digest(0)) == DAMAGED
    assert f"start from version 0 with the digest {'e' * 32}" in capsys.readouterr().out


def test_engine_that_starts_later_agrees(log: Path, file: Path, tmp_path: Path) -> None:
    """It has loaded a checkpoint of version 2, which the others lead over."""
    later = tmp_path / "later.jsonl"
    AuditFile(later, None).append([record(2, "loaded"), record(3, run="r")])
    assert audit(log, later, "--digest", digest(0)) == OK
    assert audit(file, later, "--digest", digest(0)) == OK
    assert audit(later, file, "--digest", digest(0)) == OK


def test_engine_that_is_behind_is_a_note(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behind = tmp_path / "behind.jsonl"
    AuditFile(behind, None).append([record(0, "loaded"), record(1, run="r")])
    assert audit(log, behind, "--digest", digest(0)) == OK
    assert "note: behind.jsonl: no record leads to version 3" in capsys.readouterr().out


def test_an_earlier_start_of_another_run_is_a_note(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_file(tmp_path / "engine.jsonl", run="earlier", end="e" * 32)
    again = [record(version, boot="c", run="r") for version in (1, 2, 3)]
    AuditFile(engine, None).append([record(0, "loaded", "c"), *again])
    assert audit(log, engine, "--digest", digest(0)) == OK
    assert f"note: engine.jsonl:4: version 3 had the digest {'e' * 32}" in capsys.readouterr().out


def test_changed_file_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes().replace(b"gpu-3", b"gpu-4", 1))
    assert audit(file) == DAMAGED
    assert "changed: what precedes audit.jsonl:3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--digest", "zz"], "32 lower-case hex digits"),
        (["--digest", "e" * 32, "--base", "x"], "not both"),
        (["--base", "nowhere"], "nowhere"),
    ],
)
def test_wrong_usage(
    log: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(log, *arguments) == USAGE
    assert message in capsys.readouterr().err


def test_a_trail_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = tmp_path / "nowhere"
    assert audit(nowhere) == USAGE
    assert f"delta-log: {nowhere}: cannot read the delta log" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert audit(tmp_path / "empty") == USAGE
    assert "no records" in capsys.readouterr().err


def test_a_checkpoint_gives_the_digest(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.float32).to(torch.bfloat16).reshape(2, 3)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    expected = tensor_digest("w", tensor.view(torch.uint16).reshape(-1).numpy())
    assert digest_of(tmp_path) == expected.hex()


def test_help_names_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--help"])
    assert ended.value.code == 0
    assert "they do not; each reason is named" in capsys.readouterr().out
