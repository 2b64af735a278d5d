"""The command ``delta-log``."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine_ext.cli.log import DAMAGED, OK, USAGE, main
from engine_ext.commands import INTERRUPTED
from engine_ext.files import INDEX
from engine_ext.log import (
    FolderStore,
    GroupMarks,
    Heartbeat,
    content_key,
    open_log,
    write_heartbeat,
)
from engine_ext.log.catalog import DONE, route
from tests.support.statuses import engine_status
from tests.unit.log import places
from tests.unit.log.places import part
from tests.unit.log.test_fold import apply, bodies, model, same, sparse, write


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Six versions, each with a change of its own and one of all."""
    for version in range(1, 7):
        write(tmp_path, version, [sparse("a", {version: 7 * version, 0: version})])
    return tmp_path


def test_list_shows_what_groups_wait_for(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = open_log(log)
    listing = found.listing()
    key = content_key(listing, 6)
    assert key is not None
    for name, prepared, state in (("a", key, "waiting"), ("b", None, "failing")):
        facts: dict[str, Any] = {"name": name, "engine": "vllm", "version": 5, "newest": 6}
        facts |= {"state": state, "failures": 0, "at": 0.0, "expires_s": 120.0, "behind": 1}
        facts |= {"error": None if prepared else "SpoolFull: no room", "prepared": prepared}
        write_heartbeat(found, Heartbeat(**facts, group="rollout"))
    complete = content_key(listing, 5)
    assert complete is not None
    GroupMarks(found, "rollout").write(complete, ["a", "b"])
    assert main(["list", str(log)]) == OK
    shown = capsys.readouterr().out
    assert "group rollout: version 5 is complete, 2 live member(s)" in shown
    assert "a: at version 5, has prepared 6, waiting" in shown
    assert "b: at version 5, failing: SpoolFull: no room" in shown
    assert main(["list", str(log), "--json"]) == OK
    [group] = json.loads(capsys.readouterr().out)["groups"]
    assert (group["complete"], [one["prepared"] for one in group["members"]]) == (5, [6, None])


def folders(log: Path) -> list[str]:
    return sorted(path.name for path in log.iterdir() if path.name not in ("audit", ".lock"))


def reached(log: Path, start: int) -> int | None:
    way = route(open_log(log).listing().entries, start)
    return way[-1].version if way else None


def flip(log: Path, version: int) -> None:
    path = log / f"weight_v{version:06d}" / "rank0_flush000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def engines(monkeypatch: pytest.MonkeyPatch, **versions: int) -> list[str | None]:
    """Engines at these hosts; the tokens that they were asked with."""
    tokens: list[str | None] = []

    def get(url: str, headers: dict[str, str], **options: Any) -> httpx.Response:
        host = httpx.URL(url).host
        tokens.append(headers.get("Authorization"))
        if host not in versions:
            raise httpx.ConnectError("refused")
        request = httpx.Request("GET", url)
        status = engine_status(version={"number": versions[host]})
        return httpx.Response(200, content=msgspec.json.encode(status), request=request)

    monkeypatch.setattr(httpx, "get", get)
    return tokens


def test_list(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(log).writer() as writer:
        writer.refuse(6)
    assert main(["list", str(log)]) == OK
    out = capsys.readouterr().out
    assert "weight_v000003" in out
    assert "refused" in out
    assert "version 0 leads to 5 in 5 step(s)" in out
    assert main(["list", str(log), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["base_version"], found["reached"], found["newest"]) == (0, 5, 5)
    assert [row["state"] for row in found["folders"]] == ["delta"] * 5 + ["refused"]


def test_list_tells_of_a_gap(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "weight_v000003" / DONE).unlink()
    assert main(["list", str(log)]) == DAMAGED
    out, err = capsys.readouterr()
    assert "damaged: it has no DONE" in out
    assert "leads on from version 2" in err


@pytest.mark.parametrize(
    ("size", "why"), [(None, "is missing"), (7, "has 7 bytes of")], ids=["missing", "short"]
)
def test_list_names_an_incomplete_part(
    size: int | None, why: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = log / "weight_v000003" / "rank0_flush000.safetensors"
    if size is None:
        part.unlink()
    else:
        os.truncate(part, size)
    assert main(["list", str(log)]) == DAMAGED
    out, err = capsys.readouterr()
    assert f"damaged: its rank0_flush000.safetensors {why}" in out
    assert "leads on from version 2" in err


def test_text_of_a_log_is_no_markup(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "weight_v000003" / DONE).unlink()
    index = {"metadata": {}, "weight_map": {"w": "[/x]"}}
    (log / "weight_v000003" / INDEX).write_text(json.dumps(index))
    assert main(["list", str(log)]) == DAMAGED
    assert "names '[/x]'" in capsys.readouterr().out


def test_an_empty_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == OK
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == DAMAGED
    assert capsys.readouterr().out == "there are no versions\n"
    assert main(["prune", str(tmp_path), "--keep", "1"]) == OK


@pytest.mark.slow
@pytest.mark.parametrize("command", [["list"], ["prune", "--keep", "2", "--base-version", "6"]])
def test_a_folder_is_maintained_without_torch(command: list[str], log: Path) -> None:
    """Whose import takes longer than the work."""
    name, *options = command
    program = (
        "import sys; from engine_ext.cli.log import main; "
        f"print(main({[name, str(log), *options]}), 'torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == "0 False"


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    for name, *rest in (["list"], ["verify"], ["fold", "0", "1"], ["prune", "--keep", "1"]):
        assert main([name, nowhere, *rest]) == USAGE
        shown = capsys.readouterr().err
        says = f"delta-log: {nowhere}: cannot read the delta log: No such file or directory\n"
        assert shown == says, name


def test_verify(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(log)]) == OK
    assert "6 of 6 folder(s) are sound" in capsys.readouterr().out
    flip(log, 3)
    assert main(["verify", str(log)]) == DAMAGED
    out = capsys.readouterr().out
    assert "weight_v000003: version 3 of the delta log is damaged" in out
    assert "leads on from version 2" in out
    assert "5 of 6" in out
    assert main(["verify", str(log), "1", "2"]) == OK
    assert main(["verify", str(log), "3"]) == DAMAGED
    assert main(["verify", str(log), "9"]) == DAMAGED


def test_verify_sees_versions_that_do_not_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, [sparse("a", {1: 1})], digest_before="1" * 32, digest_after="2" * 32)
    write(tmp_path, 2, [sparse("a", {1: 2})], digest_before="2" * 32, digest_after="3" * 32)
    assert main(["verify", str(tmp_path)]) == OK
    assert capsys.readouterr().out == "2 of 2 folder(s) are sound\n"
    write(tmp_path, 3, [sparse("a", {1: 3})], digest_before="4" * 32)
    assert main(["verify", str(tmp_path)]) == DAMAGED
    assert "weight_v000003: starts at other weights" in capsys.readouterr().out


def test_verify_compares_versions_of_one_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in the log leads to it, as it is the checkpoint."""
    write(tmp_path, 1, [sparse("a", {1: 1})], digest_before="1" * 32, digest_after="2" * 32)
    later = {"base_version": 0, "digest_before": "2" * 32, "digest_after": "3" * 32}
    write(tmp_path, 2, [sparse("a", {1: 2})], **later)
    assert main(["verify", str(tmp_path)]) == DAMAGED
    out = capsys.readouterr().out
    assert "weight_v000002: starts at other weights" in out
    assert "weight_v000001" not in out


def test_verify_counts_versions_without_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, [sparse("a", {1: 1})], digest_before="1" * 32, digest_after="2" * 32)
    write(tmp_path, 2, [sparse("a", {1: 2})], digest_before="2" * 32)
    write(tmp_path, 3, [sparse("a", {1: 3})])
    assert main(["verify", str(tmp_path)]) == OK
    assert capsys.readouterr().out.splitlines() == [
        "2 version(s) have no digest: whether they join is not known",
        "3 of 3 folder(s) are sound",
    ]


def test_fold(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    singles = [log / f"weight_v{version:06d}" for version in range(2, 6)]
    expected = apply(model(), log, singles)
    assert main(["fold", str(log), "1", "5"]) == OK
    assert "4 version(s)" in capsys.readouterr().out
    one = log / "weight_v000005_from_v000001"
    assert same(apply(model(), log, [one]), expected)
    assert main(["verify", str(log)]) == OK
    assert main(["fold", str(log), "1", "5"]) == DAMAGED
    assert "exists" in capsys.readouterr().err


def test_fold_says_why_not(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start, end, status, message in (
        ("5", "5", USAGE, "FROM must be below TO"),
        ("5", "9", DAMAGED, "only to 6"),
        ("9", "10", DAMAGED, "does not lead from version 9"),
    ):
        assert main(["fold", str(log), start, end]) == status, message
        assert message in capsys.readouterr().err


def test_fold_of_a_damaged_version(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(log, 3)
    before = folders(log)
    assert main(["fold", str(log), "0", "6"]) == DAMAGED
    assert "version 3 of the delta log is damaged" in capsys.readouterr().err
    assert folders(log) == before


def test_prune_keeps_the_way_from_the_base(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(log), "--keep", "2"]) == OK
    out = capsys.readouterr().out
    assert "0 of 6 version(s) deleted" in out
    assert "4 more are on the route from version 0" in out
    assert main(["fold", str(log), "0", "5"]) == OK
    assert main(["prune", str(log), "--keep", "2", "--dry-run"]) == OK
    assert len(folders(log)) == 7
    assert main(["prune", str(log), "--keep", "2"]) == OK
    assert folders(log) == ["weight_v000005", "weight_v000005_from_v000000", "weight_v000006"]
    assert reached(log, 0) == reached(log, 5) == 6


def test_prune_below_a_newer_checkpoint(log: Path) -> None:
    (log / ".weight_v000009.gone").mkdir()  # of an interrupted one
    assert main(["prune", str(log), "--before", "4", "--base-version", "3"]) == OK
    assert folders(log) == [f"weight_v{version:06d}" for version in (4, 5, 6)]


@pytest.mark.parametrize("whole", [1, 3])
def test_prune_again_keeps_the_full_version(tmp_path: Path, whole: int) -> None:
    """Nothing else leads on from the checkpoint, once what starts from there is deleted."""
    for version in range(1, 7):
        is_full = version == whole
        body = part(version, None if is_full else version - 1, full=is_full)
        places.write(open_log(tmp_path), version, body)
    for _ in range(2):
        assert main(["prune", str(tmp_path), "--keep", "2"]) == OK
        assert folders(tmp_path) == [f"weight_v{version:06d}" for version in range(whole, 7)]
    assert main(["prune", str(tmp_path), "--keep", "2", "--base-version", "4"]) == OK
    assert folders(tmp_path) == ["weight_v000005", "weight_v000006"]


def test_prune_keeps_what_engines_need(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = engines(monkeypatch, one=4, two=2)
    monkeypatch.setenv("DELTA_API_KEY", "secret")
    urls = ["--url", "http://one:1", "--url", "http://two:1/"]
    assert main(["prune", str(log), *urls, "--base-version", "6"]) == OK
    assert folders(log) == [f"weight_v{version:06d}" for version in (2, 3, 4, 5, 6)]
    assert tokens == ["Bearer secret"] * 2
    assert main(["prune", str(log), "--url", "http://gone:1", "--keep", "1"]) == USAGE
    assert "http://gone:1 does not report its version" in capsys.readouterr().err
    assert len(folders(log)) == 5


def test_prune_keeps_the_versions_of_engines_that_follow(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts: dict[str, Any] = {"engine": "vllm", "newest": 6, "state": "held", "failures": 0}
    for name, version, expires_s in (("live", 3, 1e6), ("gone", 1, -1.0)):
        heartbeat = Heartbeat(
            name=name, version=version, behind=6 - version, at=0.0, expires_s=expires_s, **facts
        )
        write_heartbeat(open_log(log), heartbeat)
    assert main(["prune", str(log), "--keep", "1", "--base-version", "5"]) == OK
    assert "1 engine(s) follow the log, the oldest at version 3" in capsys.readouterr().out
    assert folders(log) == ["followers", *(f"weight_v{version:06d}" for version in (3, 4, 5, 6))]


def test_prune_refuses_where_a_heartbeat_is_unreadable(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might be that of an engine that needs what would be deleted."""
    facts: dict[str, Any] = {"engine": "vllm", "newest": 6, "state": "held", "failures": 0}
    beat = Heartbeat(name="live", version=3, behind=3, at=0.0, expires_s=1e6, **facts)
    write_heartbeat(open_log(log), beat)
    before, open_file = folders(log), os.open

    def fails(number: int, path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("live.json"):
            raise OSError(number, os.strerror(number))
        return open_file(path, *arguments, **options)

    for number in (errno.EACCES, errno.EIO):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", partial(fails, number))
            assert main(["prune", str(log), "--keep", "1", "--base-version", "5"]) == DAMAGED
        assert "followers: its live.json cannot be read" in capsys.readouterr().err
        assert folders(log) == before


def test_prune_refuses_where_a_heartbeat_is_of_another_release(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (log / "followers").mkdir()
    (log / "followers" / "live.json").write_text('{"name": "live", "state": "new"}')
    before = folders(log)
    assert main(["prune", str(log), "--keep", "1", "--base-version", "5"]) == DAMAGED
    assert "followers/live.json" in capsys.readouterr().err
    assert folders(log) == before


def test_prune_of_a_broken_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "weight_v000003" / DONE).unlink()
    assert main(["prune", str(log), "--keep", "1"]) == DAMAGED
    assert "nothing is deleted" in capsys.readouterr().err
    assert len(folders(log)) == 6


def test_prune_removes_old_marks(log: Path) -> None:
    with open_log(log).writer() as writer:
        writer.refuse(6)
    assert main(["prune", str(log), "--keep", "3"]) == OK
    assert "weight_v000006" in folders(log)  # the highest number must stay used
    write(log, 7, [sparse("a", {1: 2})], base_version=5)
    assert main(["prune", str(log), "--keep", "3"]) == OK
    assert "weight_v000006" not in folders(log)
    assert reached(log, 0) == 7


def test_prune_must_be_told_what(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(log)]) == USAGE
    assert "--keep, --before or --url" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main(["prune", str(log), "--keep", "0"])
    assert exit.value.code == USAGE


def test_interrupted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(store: FolderStore, names: Iterable[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderStore, "delete", interrupted)
    assert main(["prune", str(log), "--before", "4", "--base-version", "3"]) == INTERRUPTED
    assert len(folders(log)) == 6


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["prune", "--help"])
    assert exit.value.code == OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "--base-version" in shown
    assert "stays reachable" in shown


@pytest.mark.slow
def test_a_log_in_an_object_store(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command does the same to it as to a folder."""
    log = open_log(store_url)
    writer = log.writer()
    for version in range(1, 5):
        draft = writer.begin(version)
        [body] = bodies(version, [sparse("a", {version: 7 * version, 0: version})])
        draft.add(body)
        draft.finish()
    abandoned = writer.begin(5)
    [body] = bodies(5, [sparse("a", {0: 9})])
    abandoned.add(body)
    assert main(["list", store_url, "--json"]) == OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["reached"], shown["newest"]) == (4, 4)
    assert main(["verify", store_url]) == OK
    assert "4 of 4 folder(s) are sound" in capsys.readouterr().out
    assert main(["fold", store_url, "0", "4"]) == OK
    assert "folded 4 version(s)" in capsys.readouterr().out
    assert main(["prune", store_url, "--keep", "1"]) == OK
    assert "3 of 5 version(s) deleted" in capsys.readouterr().out
    found = [entry.folder.name for entry in log.listing().entries]
    assert found == ["weight_v000004", "weight_v000004_from_v000000"]
    assert main(["verify", store_url]) == OK
    names = log.store.list(found[0])[found[0]].names
    [name] = [f"{found[0]}/{one}" for one in names if one.endswith("tensors")]
    log.store.put(name, b"damaged")
    capsys.readouterr()
    assert main(["list", store_url]) == DAMAGED
    assert "has 7 bytes of" in capsys.readouterr().out
    assert main(["verify", store_url]) == DAMAGED
    assert "weight_v000004: version 4 of the delta log is damaged" in capsys.readouterr().out


def test_a_url_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["list", "s3://key:secret@bucket/log"])
    assert exit.value.code == USAGE
    assert "credentials and endpoints are taken from" in " ".join(capsys.readouterr().err.split())
