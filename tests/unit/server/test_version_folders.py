"""Folders of versions by disk requests, over real receivers and appliers on two ranks."""

from __future__ import annotations

import builtins
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_server.sources.log import LogReplay
from engine_ext.format import encode_part
from engine_ext.log import open_log
from tests.support.cases import case
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import assert_error
from tests.support.folder_writer import INDEX, write_checkpoint, write_version
from tests.support.served_models import (
    delta_between,
    load,
    memory,
    random_tensor,
    target_checkpoint,
)
from tests.unit.server.version_folder_engine import (
    COLUMNS,
    EIGHT,
    FILE,
    MODELS,
    NEXT,
    NORM,
    ROWS,
    Engine,
    Rank,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.rig.close()


# What is applied -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step(engine: Engine) -> None:
    """In each encoding with each kind of checksums; back, and forward again."""
    version = NEXT
    kinds = itertools.product(("xor", "overwrite"), ("xxh3-128", "blake3", "adler32"))
    for encoding, checksum_format in kinds:
        with case((encoding, checksum_format)):
            form = {"encoding": encoding, "checksum_format": checksum_format}
            folder = write_version(
                engine.root, version, engine.base, engine.target, ranks=3, **form
            )
            engine.assert_at(engine.ask(folder), engine.target, version)
            assert engine.ask(folder).json()["status"] == "already_applied"
            back = write_version(
                engine.root, version + 1, engine.target, engine.base, encoding=encoding
            )
            engine.assert_at(engine.ask(back), engine.base, version + 1)
            assert engine.rig.post("/delta_rollback").json()["version"] == version
            engine.assert_at(engine.ask(back), engine.base, version + 1)
        version += 2


@pytest.mark.slow
def test_steps_of_some_tensors(engine: Engine) -> None:
    held = engine.base
    for number, names in enumerate([[NORM], [COLUMNS, EIGHT], [ROWS], list(Rank.shapes)]):
        after = target_checkpoint(held, names, seed=10 + number)
        version = NEXT + number
        encoding = ("xor", "overwrite")[number % 2]
        folder = write_version(engine.root, version, held, after, encoding=encoding)
        engine.assert_at(engine.ask(folder), after, version)
        held = after


def test_a_step_without_changes(engine: Engine) -> None:
    folder = write_version(engine.root, NEXT, engine.base, engine.base)
    assert os.listdir(folder) == [INDEX]
    response = engine.ask(folder)
    engine.assert_at(response, engine.base)
    assert (response.json()["nnz"], response.json()["tensors"]) == (0, 0)


@pytest.mark.slow
def test_a_plain_checkpoint(engine: Engine) -> None:
    """At any later version, with an index or as one file."""
    response = engine.ask(write_checkpoint(engine.root, 20, engine.target))
    engine.assert_at(response, engine.target, 20)
    folder = write_checkpoint(engine.root, 21, engine.base, files=1)
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    engine.assert_at(engine.ask(folder), engine.base, 21)
    other = engine.root / "no version in its name"
    folder.rename(other)
    assert_error(engine.ask(other), 400, "MalformedPart")
    engine.assert_at(engine.ask(other, weight_version=22), engine.base, 22)


@pytest.mark.parametrize("encoding", ["deltas", "deltas_zstd"])
def test_a_part_called_like_a_checkpoint(engine: Engine, encoding: str) -> None:
    deltas = [delta_between(NORM, engine.base[NORM], engine.target[NORM])]
    folder = engine.root / "step"
    folder.mkdir()
    body = encode_part(deltas, encoding=encoding, current_version=NEXT)
    (folder / "model.safetensors").write_bytes(body)
    engine.assert_at(engine.ask(folder), {**engine.base, NORM: engine.target[NORM]})
    (folder / "model.safetensors").write_bytes(b"no part")
    assert_error(engine.ask(folder), 400, "MalformedPart")


def test_a_checkpoint_that_lacks_a_tensor(engine: Engine) -> None:
    tensors = {name: t for name, t in engine.target.items() if name != NORM}
    response = engine.ask(write_checkpoint(engine.root, NEXT, tensors))
    assert assert_error(response, 422, "NotUpdatable")["tensors"] == [NORM]
    engine.assert_untouched()


def test_a_large_tensor_is_proven_in_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end in rows and elements; several tensors go in several shares."""
    for name, size in {"_CHUNK": 5, "_READ": 3, "_SHARE_BYTES": 1}.items():
        monkeypatch.setattr(f"engine_ext.sync.new_states.{name}", size)
    folder = write_version(engine.root, NEXT, engine.base, engine.target, encoding="overwrite")
    engine.assert_at(engine.ask(folder), engine.target)


# In a delta log ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_of_folders_is_replayed(engine: Engine, tmp_path: Path) -> None:
    """Up to the first that is not for these weights; a later checkpoint leads around it."""
    log = tmp_path / "log"
    engine.rig.service.log_replay = LogReplay(
        engine.rig.service.inlet,
        open_log(Path(os.path.realpath(log))),
    )
    write_version(log, NEXT, engine.base, engine.target)
    write_version(log, NEXT + 1, engine.target, engine.target)
    wrong = target_checkpoint(engine.target, [NORM], seed=50)
    assert not torch.equal(wrong[NORM], engine.target[NORM])
    write_version(log, NEXT + 2, wrong, engine.base)
    error = assert_error(engine.rig.post("/delta_catch_up"), 409, "LogDamaged", newest=NEXT + 2)
    assert "checksum" in error["damaged"][f"weight_v{NEXT + 2:06d}"]
    assert engine.memories() == [memory(load(model, engine.target)) for model in MODELS]
    assert engine.rig.status().version.number == NEXT + 1

    write_checkpoint(log, NEXT + 3, wrong)
    write_version(log, NEXT + 4, wrong, engine.base, encoding="overwrite")
    answer = engine.rig.post("/delta_catch_up").json()
    assert (answer["status"], answer["applied"]) == ("caught_up", [NEXT + 3, NEXT + 4])
    assert engine.memories() == [memory(load(model, engine.base)) for model in MODELS]


# What is refused -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_base_version(engine: Engine) -> None:
    folder = write_version(engine.root, NEXT + 1, engine.base, engine.target)
    assert_error(engine.ask(folder), 409, "VersionConflict", expected=NEXT, actual=VERSION)
    engine.assert_untouched()


def test_one_byte_of_the_base_is_another(engine: Engine) -> None:
    """Also one that the step does not change: the trainer's base is not the engine's."""
    for name, (byte, encoding) in itertools.product(
        Rank.shapes, ((0, "xor"), (-1, "xor"), (-1, "overwrite"))
    ):
        with case((name, byte, encoding)):
            wrong = {**engine.base, name: engine.base[name].clone()}
            wrong[name].view(torch.uint8).view(-1)[byte] ^= 1
            after = {**wrong, name: wrong[name].clone()}
            after[name].view(torch.uint8).view(-1)[2] ^= 3
            folder = write_version(engine.root, NEXT, wrong, after, encoding=encoding)
            error = assert_error(engine.ask(folder), 409, "BaseMismatch", tensor=name)
            assert error["expected"] != error["actual"]
            assert engine.memories() == [memory(load(model, engine.base)) for model in MODELS]
            shutil.rmtree(folder)
    engine.assert_untouched()


def test_a_folder_that_is_published_again_is_no_continuation(engine: Engine) -> None:
    folder = write_version(engine.root, NEXT, engine.base, engine.target)
    engine.assert_at(engine.ask(folder), engine.target)
    shutil.rmtree(folder)
    other = target_checkpoint(engine.target, Rank.shapes, seed=5)
    write_version(engine.root, NEXT, engine.target, other)
    assert_error(engine.ask(folder), 409, "VersionConflict")
    assert engine.memories() == [memory(load(model, engine.target)) for model in MODELS]


def test_a_key_for_signatures(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_version(engine.root, NEXT, engine.base, engine.target)
    monkeypatch.setenv("DELTA_HMAC_KEY", "secret")
    assert_error(engine.ask(folder), 401, "Unauthorized")
    checkpoint = write_checkpoint(engine.root, NEXT + 1, engine.target, files=1)
    assert_error(engine.ask(checkpoint), 401, "Unauthorized")
    (checkpoint / INDEX).unlink()
    (checkpoint / FILE).rename(checkpoint / "model.safetensors")
    assert_error(engine.ask(checkpoint), 401, "Unauthorized")
    monkeypatch.delenv("DELTA_HMAC_KEY")
    engine.assert_untouched()


def test_without_the_package_of_a_checksum(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_version(engine.root, NEXT, engine.base, engine.target, checksum_format="blake3")
    real = builtins.__import__

    def absent(name: str, *args: Any, **keys: Any) -> Any:
        if name == "blake3":
            raise ModuleNotFoundError(name)
        return real(name, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", absent)
        error = assert_error(engine.ask(folder), 422, "NotUpdatable")
    assert "install it" in error["message"]
    engine.assert_untouched()


def test_a_base_that_is_read_wrong_by_one_rank(engine: Engine) -> None:
    """Memory that was changed outside of a sync shows, on whichever rank."""
    live = engine.served[1].model.columns.data.view(torch.int16)
    live.view(-1)[-1] ^= 1
    after = {**engine.base, COLUMNS: random_tensor((3, 8), torch.bfloat16, 9)}
    folder = write_version(engine.root, NEXT, engine.base, after)
    assert_error(engine.ask(folder), 409, "BaseMismatch", tensor=COLUMNS)
    live.view(-1)[-1] ^= 1
    engine.assert_untouched()
