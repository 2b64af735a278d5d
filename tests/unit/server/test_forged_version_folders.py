"""Broken folders of versions, written byte by byte: refused, with the engine unchanged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from engine_ext.conformance.toy_models import Checkpoint
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import assert_error
from tests.support.folder_writer import INDEX, write_index
from tests.unit.server.version_folder_engine import FILE, NEXT, NORM, ROWS, Engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that gets broken folders only, and accepts a correct one in the end."""
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.assert_untouched()
    engine.rig.close()


@pytest.fixture
def engine(served: Engine) -> Iterator[Engine]:
    yield served
    served.assert_unchanged()


@pytest.fixture
def root(served: Engine) -> Path:
    """A folder that the engine can read."""
    return Path(tempfile.mkdtemp(dir=served.root))


# The bytes of a folder with one tensor: "norm", five elements of bf16.
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
    """The parts of a folder with one changed tensor; a test can replace each of them."""

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


@pytest.mark.slow
def test_the_forge_is_correct(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    folder = Forge(engine.base).write(engine.root)
    new = torch.frombuffer(bytearray(Forge(engine.base).new), dtype=torch.bfloat16)
    engine.assert_at(engine.ask(folder), {**engine.base, NORM: new})
    engine.rig.close()


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
    "a file of very many": (mapping({NORM: f"model-1-of-{'9' * 5000}.safetensors"}), 400),
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
def test_a_broken_folder(engine: Engine, root: Path, what: str) -> None:
    change, status = BROKEN[what]
    forge = Forge(engine.base)
    change(forge)
    response = engine.ask(forge.write(root))
    assert response.status_code == status, response.text
    assert response.json()["error"]["engine_state"] == "unchanged"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000]
)
def test_a_broken_index(engine: Engine, root: Path, text: str) -> None:
    folder = Forge(engine.base).write(root)
    (folder / INDEX).write_text(text)
    assert_error(engine.ask(folder), 400, "MalformedPart")


def test_a_folder_that_is_not_complete(engine: Engine, root: Path) -> None:
    """Without its index, files are taken for parts, which they are not."""
    folder = Forge(engine.base).write(root)
    (folder / INDEX).unlink()
    assert_error(engine.ask(folder), 400, "MalformedPart")
    (folder / FILE).unlink()
    assert_error(engine.ask(folder), 400, "MalformedPart")


def test_a_header_that_is_cut_short(engine: Engine, root: Path) -> None:
    folder = Forge(engine.base).write(root)
    data = (folder / FILE).read_bytes()
    for size in (0, 7, 8, 20):
        (folder / FILE).write_bytes(data[:size])
        assert_error(engine.ask(folder), 400, "MalformedPart")
    (folder / FILE).write_bytes(b"\xff" * 8 + data[8:])
    assert_error(engine.ask(folder), 413, "TooLarge")


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_a_link_out_of_the_root(engine: Engine, root: Path, name: str, tmp_path: Path) -> None:
    folder = Forge(engine.base).write(root)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_error(engine.ask(folder), 403, "PathForbidden")
