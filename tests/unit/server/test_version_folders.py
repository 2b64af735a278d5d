"""Folders of versions by disk requests, over real receivers and appliers on two ranks.

A broken folder is refused with the engine unchanged; each is written byte by byte.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import zstandard

from delta_server.log_replay import LogReplay
from engine_ext.delta_log import FolderLog
from engine_ext.wire import encode_part
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.folder_writer import INDEX, write_checkpoint, write_index, write_version
from tests.support.served_models import (
    Served,
    base_checkpoint,
    delta_between,
    load,
    memory,
    random_tensor,
    serve_ranks,
    target_checkpoint,
)
from tests.support.toy_models import Checkpoint, ToyModel, parameter

NEXT = VERSION + 1
COLUMNS, ROWS, NORM, WIDE, EIGHT = "columns", "rows", "norm", "wide", "eight"


class Rank(ToyModel):
    """One of two ranks: shards of two tensors, copies of the others, one of them widened."""

    shapes: ClassVar = {COLUMNS: (3, 8), ROWS: (6, 4), NORM: (5,), WIDE: (4,), EIGHT: (2, 8)}
    dtypes: ClassVar = {ROWS: torch.float32, EIGHT: torch.float8_e4m3fn}
    rank = 0

    def build(self) -> None:
        self.columns = parameter(3, 4)
        self.rows = parameter(3, 4, dtype=torch.float32)
        self.norm, self.wide = parameter(5), parameter(4, dtype=torch.float32)
        self.eight = parameter(2, 4, dtype=torch.float8_e4m3fn)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        dim = {COLUMNS: 1, ROWS: 0, EIGHT: 1}.get(name)
        if dim is not None:
            size = weight.shape[dim] // 2
            weight = weight.narrow(dim, self.rank * size, size)
        getattr(self, name).copy_(weight)


class Second(Rank):
    shapes: ClassVar = Rank.shapes
    dtypes: ClassVar = Rank.dtypes
    rank = 1


MODELS = (Rank, Second)


class Engine:
    """The endpoints, over two ranks of a model, and the folder that they may read."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.base = base_checkpoint(Rank)
        self.target = target_checkpoint(self.base, Rank.shapes)
        self.rig = Rig(folder / "spool", roots=(os.path.realpath(self.root),))
        self.served: list[Served] = serve_ranks(MODELS, self.base, apply="scatter")
        for receiver, served in zip(self.rig.engine.receivers, self.served, strict=True):
            receiver.adopt(served.applier)

    def memories(self) -> list[dict[str, bytes]]:
        return [memory(served.model) for served in self.served]

    def ask(self, folder: Path, **keys: Any) -> Any:
        return self.rig.disk(folder, **keys)

    def assert_at(self, response: Any, tensors: Checkpoint, version: int = NEXT) -> None:
        """The sync was committed, and every rank is one that has loaded these tensors."""
        assert response.status_code == 200, response.text
        assert (response.json()["status"], response.json()["version"]) == ("committed", version)
        assert self.memories() == [memory(load(model, tensors)) for model in MODELS]
        assert self.rig.engine.weight_version == str(version)
        assert self.rig.spooled() == []
        scan = self.rig.get("/delta_digest", params={"scan": "true"}).json()
        assert scan["corrupted"] == []

    def assert_untouched(self) -> None:
        """Nothing was written, and the next correct folder is accepted."""
        assert self.memories() == [memory(load(model, self.base)) for model in MODELS]
        assert self.rig.status()["version"] == VERSION
        assert (self.rig.engine.paused, self.rig.spooled()) == (False, [])
        folder = write_version(self.root / "correct", NEXT, self.base, self.target)
        self.assert_at(self.ask(folder), self.target)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.rig.close()


# What is applied -----------------------------------------------------------------------------


@pytest.mark.parametrize("checksum_format", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_step(engine: Engine, encoding: str, checksum_format: str) -> None:
    folder = write_version(
        engine.root,
        NEXT,
        engine.base,
        engine.target,
        encoding=encoding,
        checksum_format=checksum_format,
        ranks=3,
    )
    engine.assert_at(engine.ask(folder), engine.target)
    assert engine.ask(folder).json()["status"] == "already_applied"
    # Back, and forward again.
    back = write_version(engine.root, NEXT + 1, engine.target, engine.base, encoding=encoding)
    engine.assert_at(engine.ask(back), engine.base, NEXT + 1)
    assert engine.rig.post("/delta_rollback").json()["version"] == NEXT
    engine.assert_at(engine.ask(back), engine.base, NEXT + 1)


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
        monkeypatch.setattr(f"engine_ext.apply.new_states.{name}", size)
    folder = write_version(engine.root, NEXT, engine.base, engine.target, encoding="overwrite")
    engine.assert_at(engine.ask(folder), engine.target)


# In a delta log ------------------------------------------------------------------------------


def test_a_log_of_folders_is_replayed(engine: Engine, tmp_path: Path) -> None:
    """Up to the first that is not for these weights; a later checkpoint leads around it."""
    log = tmp_path / "log"
    engine.rig.service.log_replay = LogReplay(
        engine.rig.service.committer,
        engine.rig.service.apply_files,
        engine.rig.engine,
        FolderLog(Path(os.path.realpath(log))),
    )
    write_version(log, NEXT, engine.base, engine.target)
    write_version(log, NEXT + 1, engine.target, engine.target)
    wrong = target_checkpoint(engine.target, [NORM], seed=50)
    assert not torch.equal(wrong[NORM], engine.target[NORM])
    write_version(log, NEXT + 2, wrong, engine.base)
    error = assert_error(engine.rig.post("/delta_catch_up"), 409, "LogDamaged", newest=NEXT + 2)
    assert "checksum" in error["damaged"][f"weight_v{NEXT + 2:06d}"]
    assert engine.memories() == [memory(load(model, engine.target)) for model in MODELS]
    assert engine.rig.status()["version"] == NEXT + 1

    write_checkpoint(log, NEXT + 3, wrong)
    write_version(log, NEXT + 4, wrong, engine.base, encoding="overwrite")
    answer = engine.rig.post("/delta_catch_up").json()
    assert (answer["status"], answer["applied"]) == ("caught_up", [NEXT + 3, NEXT + 4])
    assert engine.memories() == [memory(load(model, engine.base)) for model in MODELS]


# What is refused -----------------------------------------------------------------------------


def test_a_wrong_base_version(engine: Engine) -> None:
    folder = write_version(engine.root, NEXT + 1, engine.base, engine.target)
    assert_error(engine.ask(folder), 409, "VersionConflict", expected=NEXT, actual=VERSION)
    engine.assert_untouched()


@pytest.mark.parametrize("name", [*Rank.shapes])
@pytest.mark.parametrize(("byte", "encoding"), [(0, "xor"), (-1, "xor"), (-1, "overwrite")])
def test_one_byte_of_the_base_is_another(
    engine: Engine, name: str, byte: int, encoding: str
) -> None:
    """Also one that the step does not change: the trainer's base is not the engine's."""
    wrong = {**engine.base, name: engine.base[name].clone()}
    wrong[name].view(torch.uint8).view(-1)[byte] ^= 1
    after = {**wrong, name: wrong[name].clone()}
    after[name].view(torch.uint8).view(-1)[2] ^= 3
    folder = write_version(engine.root, NEXT, wrong, after, encoding=encoding)
    error = assert_error(engine.ask(folder), 409, "BaseMismatch", tensor=name)
    assert error["expected"] != error["actual"]
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


# The bytes of a folder with one tensor: "norm", five elements of bf16.
FILE = "model-00001-of-00001.safetensors"
XOR = bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0x80])
METADATA = {
    "version": f"{NEXT:06d}",
    "base_version": f"{VERSION:06d}",
    "delta_encoding": "xor",
    "compression_format": "zstd",
    "checksum_format": "adler32",
}


def adler32(data: bytes) -> str:
    low, high = 1, 0
    for byte in data:
        low = (low + byte) % 65521
        high = (high + low) % 65521
    return f"{high << 16 | low:08x}"


class Forge:
    """The parts of a folder with one changed tensor, each of which a test may replace."""

    def __init__(self, base: Checkpoint) -> None:
        old = base[NORM].view(torch.uint8).numpy().tobytes()
        self.new = bytes(a ^ b for a, b in zip(old, XOR, strict=True))
        self.index: dict[str, Any] = {"metadata": dict(METADATA), "weight_map": {NORM: FILE}}
        self.content, self.frame = XOR, b""
        self.checksums = {NORM: adler32(self.new)}
        self.dtype, self.name, self.tail = "U8", NORM, b""
        self.offsets: list[int] | None = None
        self.files = {FILE}

    def write(self, root: Path) -> Path:
        folder = root / f"weight_v{NEXT:06d}"
        folder.mkdir()
        frame = self.frame or zstandard.compress(self.content, 1)
        width = {"U8": 1, "F8_E4M3": 1, "BF16": 2}[self.dtype]
        tensor = {
            "dtype": self.dtype,
            "shape": [len(frame) // width],
            "data_offsets": self.offsets or [0, len(frame)],
        }
        header = json.dumps({"__metadata__": self.checksums, self.name: tensor}).encode()
        data = len(header).to_bytes(8, "little") + header + frame + self.tail
        for file in self.files:
            (folder / file).write_bytes(data)
        write_index(folder, **self.index)
        return folder


def test_the_forge_is_correct(engine: Engine) -> None:
    folder = Forge(engine.base).write(engine.root)
    new = torch.frombuffer(bytearray(Forge(engine.base).new), dtype=torch.bfloat16)
    engine.assert_at(engine.ask(folder), {**engine.base, NORM: new})


def of_index(**changes: Any) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        forge.index["metadata"].update(changes)

    return change


def without(key: str) -> Callable[[Forge], None]:
    return lambda forge: forge.index["metadata"].pop(key)


def setting(**values: Any) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        for name, value in values.items():
            setattr(forge, name, value)

    return change


def mapping(weight_map: dict[str, str]) -> Callable[[Forge], None]:
    return lambda forge: forge.index.update(weight_map=weight_map)


GOOD = zstandard.compress(XOR, 1)
OVERWRITE = of_index(delta_encoding="overwrite")
DIGITS = "0" * 8


def overwriting(content: bytes) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        OVERWRITE(forge)
        forge.content = content

    return change


BROKEN: dict[str, tuple[Callable[[Forge], Any], int]] = {
    "an unknown delta encoding": (of_index(delta_encoding="add"), 400),
    "an unknown compression": (of_index(compression_format="lz4"), 400),
    "an unknown checksum": (of_index(checksum_format="md5"), 400),
    "no delta encoding": (without("delta_encoding"), 400),
    "no base version": (without("base_version"), 400),
    "no version": (without("version"), 400),
    "no checksum format": (without("checksum_format"), 400),
    "a base after the version": (of_index(base_version="000009"), 400),
    "a version that is no number": (of_index(version="eight"), 400),
    "a version below zero": (of_index(base_version="-1"), 400),
    "a version that is a list": (of_index(version=[8]), 400),
    "another version than the folder's": (of_index(version="000009"), 400),
    "another base than the engine's": (of_index(base_version="000006"), 409),
    "a file outside the folder": (mapping({NORM: "../" + FILE}), 400),
    "a file that is no safetensors": (mapping({NORM: "DONE"}), 400),
    "a file that is not there": (setting(files=set()), 400),
    "a file more": (setting(files={FILE, "model-00002-of-00002.safetensors"}), 400),
    "a number of files that is not theirs": (
        mapping({NORM: "model-00001-of-00002.safetensors"}),
        400,
    ),
    "a tensor more in the index": (mapping({NORM: FILE, ROWS: FILE}), 400),
    "a tensor more in the file": (mapping({ROWS: FILE}), 400),
    "a tensor that the checkpoint lacks": (
        lambda forge: (
            mapping({"other": FILE})(forge),
            setting(name="other", checksums={"other": DIGITS})(forge),
        ),
        422,
    ),
    "a tensor without a checksum": (setting(checksums={}), 400),
    "a checksum of another length": (setting(checksums={NORM: DIGITS + "0"}), 400),
    "a checksum that is not hex": (setting(checksums={NORM: "0000000g"}), 400),
    "a checksum of other bytes": (setting(checksums={NORM: adler32(XOR)}), 409),
    "frames of another dtype": (setting(dtype="F8_E4M3"), 400),
    "a gap before the data": (setting(offsets=[1, len(GOOD) + 1], tail=b"\0"), 400),
    "offsets that end before the tensor": (setting(offsets=[0, len(GOOD) - 1]), 400),
    "bytes after the data": (setting(tail=b"\0"), 400),
    "a file cut short": (setting(offsets=[0, len(GOOD) + 1]), 400),
    "no frame": (setting(frame=XOR), 400),
    "a frame cut short": (setting(frame=GOOD[:-1]), 400),
    "two frames": (setting(frame=GOOD + GOOD), 400),
    "a frame with a byte after it": (setting(frame=GOOD + b"\0"), 400),
    "an xor of one byte less": (setting(content=XOR[:-1]), 400),
    "an xor of one byte more": (setting(content=XOR + b"\0"), 400),
    "an xor with a bit flipped": (setting(content=b"\3" + XOR[1:]), 409),
    "a bomb": (setting(content=bytes(1 << 26)), 400),
    "a bomb without a size": (
        setting(frame=zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26))),
        413,
    ),
    "more positions than bytes": (overwriting(b"\2\0\0\0" + b"\1\0\0\0" + b"\7"), 400),
    "a count that is cut short": (overwriting(b"\1\0"), 400),
    "a position after the tensor": (overwriting(b"\1\0\0\0" + b"\x0a\0\0\0" + b"\7"), 422),
    "a position twice": (overwriting(b"\2\0\0\0" + b"\1\0\0\0" * 2 + b"\7\7"), 422),
    "an overwritten byte that is another": (overwriting(b"\1\0\0\0" + b"\0\0\0\0" + b"\7"), 409),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder(engine: Engine, what: str) -> None:
    change, status = BROKEN[what]
    forge = Forge(engine.base)
    change(forge)
    response = engine.ask(forge.write(engine.root))
    assert response.status_code == status, response.text
    assert response.json()["error"]["engine_state"] == "unchanged"
    engine.assert_untouched()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000]
)
def test_a_broken_index(engine: Engine, text: str) -> None:
    folder = Forge(engine.base).write(engine.root)
    (folder / INDEX).write_text(text)
    assert_error(engine.ask(folder), 400, "MalformedPart")
    engine.assert_untouched()


def test_a_folder_that_is_not_complete(engine: Engine) -> None:
    """Without its index, files are taken for parts, which they are not."""
    folder = Forge(engine.base).write(engine.root)
    (folder / INDEX).unlink()
    assert_error(engine.ask(folder), 400, "MalformedPart")
    (folder / FILE).unlink()
    assert_error(engine.ask(folder), 400, "MalformedPart")
    engine.assert_untouched()


def test_a_header_that_is_cut_short(engine: Engine) -> None:
    folder = Forge(engine.base).write(engine.root)
    data = (folder / FILE).read_bytes()
    for size in (0, 7, 8, 20):
        (folder / FILE).write_bytes(data[:size])
        assert_error(engine.ask(folder), 400, "MalformedPart")
    (folder / FILE).write_bytes(b"\xff" * 8 + data[8:])
    assert_error(engine.ask(folder), 413, "TooLarge")
    engine.assert_untouched()


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_a_link_out_of_the_root(engine: Engine, name: str, tmp_path: Path) -> None:
    folder = Forge(engine.base).write(engine.root)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_error(engine.ask(folder), 403, "PathForbidden")
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
