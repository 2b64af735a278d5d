"""Parse and check the index of a version's folder, ``model.safetensors.index.json``.

It is written last, so a folder that has one is complete::

    {"metadata": {"version": "000012", "base_version": "000011", "delta_encoding": "xor",
                  "compression_format": "zstd", "checksum_format": "xxh3-128"},
     "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors", ...}}

The index of a plain checkpoint has none of these keys in its ``metadata``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

import msgspec

from engine_ext.errors import MalformedPart, TooLarge
from engine_ext.files import INDEX
from engine_ext.format import CHECKSUM_DIGITS, MAX_VERSION, Limits
from engine_ext.structs import prepare

LENGTH_BYTES: Final = 8  # of the header's length, at the start of a safetensors file
METADATA: Final = "__metadata__"  # in the header

_SUFFIX: Final = ".safetensors"
_ENCODINGS: Final = ("xor", "overwrite")
_KEYS: Final = ("version", "base_version", "delta_encoding", "compression_format",
                "checksum_format")  # fmt: skip
_VERSION: Final = re.compile(r"[0-9]{1,19}")
_NUMBERED: Final = re.compile(r"model-[0-9]+-of-([0-9]{1,19})\.safetensors")


class _IndexJson(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, object] | None = None


prepare(_IndexJson)


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """A checked index.

    Attributes:
        version, base_version: where the delta leads to, and where it starts from; None if full.
        encoding: ``xor`` or ``overwrite``; None if the folder is a plain checkpoint.
        checksum_format: of the tensors' new states, a key of `CHECKSUM_DIGITS`; None if full.
        files: by name of a file in the folder, the names of its tensors. Empty for a version
            without changes.
    """

    version: int | None
    base_version: int | None
    encoding: str | None
    checksum_format: str | None
    files: Mapping[str, frozenset[str]]

    @property
    def full(self) -> bool:
        """Whether the folder is a plain checkpoint."""
        return self.encoding is None

    @classmethod
    def of_checkpoint(cls, file: str, header: bytes) -> VersionIndex:
        """Return the index of a plain checkpoint of one file, from that file's header.

        Raises:
            MalformedPart: the header is not JSON of an object.
        """
        try:
            names = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError) as error:
            raise MalformedPart(f"{file}: safetensors header: {error}", file=file) from None
        tensors = frozenset(names.keys() - {METADATA})
        return cls(None, None, None, None, {file: tensors})


def parse_index(raw: bytes, limits: Limits) -> VersionIndex:
    """Parse and check an index.

    Raises:
        MalformedPart: it is no index of a delta or of a checkpoint, or contradicts itself.
        TooLarge: a count exceeds `limits`.
    """
    if len(raw) > limits.max_header_bytes:
        raise TooLarge(f"{INDEX} is over {limits.max_header_bytes} bytes")
    try:
        index = msgspec.json.decode(raw, type=_IndexJson)
    except (ValueError, RecursionError) as error:
        raise MalformedPart(f"{INDEX}: {error}") from None
    if len(index.weight_map) > limits.max_params:
        raise TooLarge(f"{INDEX} names over {limits.max_params} tensors", limit=limits.max_params)
    files: dict[str, set[str]] = {}
    for tensor, file in index.weight_map.items():
        if not tensor or len(tensor.encode()) > limits.max_name_bytes:
            raise MalformedPart(
                f"{INDEX}: a tensor's name is empty or over {limits.max_name_bytes} bytes"
            )
        files.setdefault(file, set()).add(tensor)
    _check_files(files, limits)
    named = {name: frozenset(tensors) for name, tensors in sorted(files.items())}
    metadata = index.metadata or {}
    if not any(key in metadata for key in ("delta_encoding", "base_version", "checksum_format")):
        if not named:
            raise MalformedPart(f"{INDEX} has neither tensors nor the keys of a delta")
        return VersionIndex(None, None, None, None, named)
    given = {key: _text(metadata, key) for key in _KEYS}
    version = _version(given["version"], "version")
    base = _version(given["base_version"], "base_version")
    if base >= version:
        raise MalformedPart(f"{INDEX}: a delta must lead to a later version: {base} to {version}")
    _check_known("delta_encoding", given["delta_encoding"], _ENCODINGS)
    _check_known("compression_format", given["compression_format"], ("zstd",))
    _check_known("checksum_format", given["checksum_format"], tuple(CHECKSUM_DIGITS))
    return VersionIndex(version, base, given["delta_encoding"], given["checksum_format"], named)


def _check_files(files: Mapping[str, object], limits: Limits) -> None:
    if len(files) > limits.max_parts:
        raise TooLarge(f"{INDEX} names over {limits.max_parts} files", limit=limits.max_parts)
    for name in files:
        plain = PurePath(name).name == name and "\0" not in name and name.endswith(_SUFFIX)
        if not plain:
            raise MalformedPart(f"{INDEX} names {name[:80]!r}, which is no file of its folder")
        numbered = _NUMBERED.fullmatch(name)
        if numbered is not None and int(numbered[1]) != len(files):
            raise MalformedPart(f"{INDEX} names {len(files)} files, one of them {name}", file=name)


def _text(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise MalformedPart(f"{INDEX}: its metadata has no {key}")
    return str(value)


def _version(text: str, what: str) -> int:
    if _VERSION.fullmatch(text) is None or int(text) > MAX_VERSION:
        raise MalformedPart(f"{INDEX}: {what} is not a decimal: {text[:80]!r}")
    return int(text)


def _check_known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise MalformedPart(f"{INDEX}: {what} is {value[:80]!r}; known are {', '.join(known)}")
