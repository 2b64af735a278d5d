"""Parse the header of one safetensors file in a version's folder.

In a delta, each tensor is ``U8`` and holds one zstd frame, and ``__metadata__`` has the checksum of
each tensor's whole new bytes under the tensor's name. In a plain checkpoint, tensors are what they
are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from engine_ext.dtypes import NAME_OF_CODE, itemsize
from engine_ext.errors import MalformedPart, TooLarge
from engine_ext.format import CHECKSUM_DIGITS, Limits
from engine_ext.structs import prepare
from engine_ext.version_folders.index import LENGTH_BYTES, METADATA, VersionIndex

_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


prepare(_Tensor)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file.

    Attributes:
        dtype: manifest name; of a delta ``uint8``.
        begin, end: its bytes in the file.
        new_checksum: ``<format>:<hex>`` of its whole new bytes; None in a plain checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    new_checksum: str | None


def header_bytes(prefix: bytes, limits: Limits) -> int:
    """Return the length of a file's header with its length field, from its first 8 bytes.

    Raises:
        MalformedPart, TooLarge: the file is cut short, or declares too long a header.
    """
    if len(prefix) < LENGTH_BYTES:
        raise MalformedPart("the file ends before its header")
    length = int.from_bytes(prefix, "little")
    if length > limits.max_header_bytes:
        limit = limits.max_header_bytes
        raise TooLarge(f"a header of {length} bytes; is it a safetensors file?", limit=limit)
    return LENGTH_BYTES + length


def parse_file(
    raw: bytes, size: int, index: VersionIndex, file: str, limits: Limits
) -> list[FileTensor]:
    """Parse and check the header of a file, with its length field.

    Args:
        size: bytes of the whole file.
        file: its name in the index.

    Returns:
        Its tensors, in the order of their bytes.

    Raises:
        MalformedPart: the header contradicts itself, the index, or the file's size.
        TooLarge: a count exceeds `limits`.
    """
    try:
        decoded = msgspec.json.decode(raw[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(decoded.pop(METADATA, b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(one, type=_Tensor) for name, one in decoded.items()}
    except (ValueError, RecursionError) as error:
        raise MalformedPart(f"{file}: safetensors header: {error}", file=file) from None
    if tensors.keys() != index.files[file]:
        [name, *_] = sorted(index.files[file] ^ tensors.keys())
        raise MalformedPart(f"{file} and the index disagree about {name!r}", file=file, tensor=name)
    found = [
        _tensor(name, tensor, len(raw), metadata, index, limits)
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets)
    ]
    end = len(raw)
    for one in found:
        if one.begin != end:
            raise MalformedPart(
                f"{file}: the tensors leave a gap, or overlap", file=file, tensor=one.name
            )
        end = one.end
    if end != size:
        raise MalformedPart(f"{file} has {size} bytes, not its {end}", file=file)
    return found


def _tensor(
    name: str,
    tensor: _Tensor,
    data_begin: int,
    metadata: dict[str, str],
    index: VersionIndex,
    limits: Limits,
) -> FileTensor:
    dtype = NAME_OF_CODE.get(tensor.dtype)
    if dtype is None:
        raise MalformedPart(f"{name} has the unknown dtype {tensor.dtype[:80]!r}", tensor=name)
    begin, end = tensor.data_offsets
    if len(tensor.shape) > limits.max_ndim or math.prod(tensor.shape) > limits.max_numel:
        raise TooLarge(f"{name} has too many dimensions or elements", tensor=name)
    if math.prod(tensor.shape) * itemsize(dtype) != end - begin:
        raise MalformedPart(
            f"{name} of shape {list(tensor.shape)} is not {end - begin} bytes of {dtype}",
            tensor=name,
        )
    if end - begin > limits.max_part_bytes:
        limit = limits.max_part_bytes
        raise TooLarge(f"{name} has {end - begin} bytes; the limit is {limit}", tensor=name)
    checksum = None
    if index.checksum_format is not None:
        if dtype != "uint8" or len(tensor.shape) != 1:
            raise MalformedPart(f"{name} is not the uint8 bytes of a zstd frame", tensor=name)
        checksum = _checksum(name, metadata.get(name), index.checksum_format)
    return FileTensor(name, dtype, tensor.shape, data_begin + begin, data_begin + end, checksum)


def _checksum(name: str, text: str | None, checksum_format: str) -> str:
    digits = CHECKSUM_DIGITS[checksum_format]
    if text is None or len(text) != digits or _HEX.fullmatch(text) is None:
        raise MalformedPart(
            f"{name} has no {checksum_format} checksum of {digits} hex digits", tensor=name
        )
    return f"{checksum_format}:{text.lower()}"
