"""Inputs of the receiver: parts of every encoding, broken in one or several places."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash
import zstandard
from hypothesis import strategies as st

from engine_ext.format import ENCODINGS, ParamDelta, encode_part
from engine_ext.format.digest import Digest, change_digest
from engine_ext.format.manifest import manifest_checksum
from tests.support.delta_bodies import fresh_weights
from tests.support.independent_encoder import bits16, header_of, sendable, with_header
from tests.support.mutations import byte_mutants, mutants

Shapes = Mapping[str, tuple[int, ...]]

ARRAYS = ("__positions__", "__values__")
DEEP = 20_000
LENGTHS = [0, 1, 7, 8, 2**20, 2**26, 2**26 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
# Literal JSON texts that every decoder must accept or refuse, and not fail on.
TEXTS = [
    "[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP, "1" * 5000, "-1", "1e999", "NaN", "",
    "Infinity", '"\\ud800"', '"\\u0000"', "\x00", "\ufeff[]", "[]", "{}", "null", "true", '""',
    "[[]]", "[{}]",
]  # fmt: skip


@st.composite
def good(draw: st.DrawFn, shapes: Shapes, encodings: tuple[str, ...] = ENCODINGS) -> bytes:
    """A valid part with some of these tensors."""
    names = draw(st.lists(st.sampled_from(sorted(shapes)), max_size=3, unique=True))
    deltas = []
    for name in names:
        numel = int(np.prod(shapes[name]))
        where = draw(st.sets(st.integers(0, numel - 1), max_size=6))
        indices = None if draw(st.integers(0, 4)) == 0 else np.array(sorted(where), np.int64)
        count = numel if indices is None else indices.size
        values = bits16(*draw(st.lists(st.integers(0, 0xFFFF), min_size=count, max_size=count)))
        deltas.append(ParamDelta(name, "bfloat16", shapes[name], indices, values))
    encoding = draw(st.sampled_from(encodings))
    extra: dict[str, Any]
    sent, extra = sendable(encoding, deltas)
    if bool(extra) and draw(st.booleans()):
        extra["digest_part"] = added_to_fresh_weights(sent)
    version = draw(st.sampled_from([8, 8, 8, 9, 7, 0]))
    extra |= draw(
        st.sampled_from(
            [
                {},
                {"sync_id": "one"},
                {"sync_id": "one", "part": 0, "num_parts": 2},
                {"sync_id": "one", "part": 1, "num_parts": 2},
                {"base_version": 7},
                {"run": "one", "run_owner": "host:1"},
                {"run": "one", "run_epoch": 2, "sync_id": "one"},
            ]
        )
    )
    hashed = draw(st.booleans())
    return encode_part(
        sent, encoding=encoding, current_version=version, with_manifest_checksum=hashed, **extra
    )


def added_to_fresh_weights(deltas: Iterable[ParamDelta]) -> str:
    """The digest of what differences change in the engine's first weights."""
    change = Digest.ZERO
    for delta in deltas:
        old = fresh_weights()[delta.name][delta.indices]
        change += change_digest(delta.name, delta.indices, old, old + delta.values)
    return change.hex()


def is_container(body: bytes) -> bool:
    """Whether the header can be read, so that its places can be changed."""
    try:
        header, _ = header_of(body)
        params = json.loads(header["__metadata__"]["params"])
        return bool(params) and all(isinstance(entry, dict) and entry for entry in params)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def mended(body: bytes) -> bytes:
    """The same with the checksums that its bytes have, so that it is read further."""
    header, data = header_of(body)
    metadata = header["__metadata__"]
    try:
        spans = [header[name]["data_offsets"] for name in ARRAYS]
        pieces = [data[begin:end] for begin, end in spans]
    except (KeyError, TypeError, ValueError):
        return body
    metadata["checksum"] = "xxh3_128:" + xxhash.xxh3_128_hexdigest(b"".join(pieces))
    if "manifest_checksum" in metadata and all(isinstance(v, str) for v in metadata.values()):
        try:
            metadata["manifest_checksum"] = manifest_checksum(metadata)
        except UnicodeEncodeError:
            return body
    return with_header(header, data)


@st.composite
def texts(draw: st.DrawFn, body: bytes) -> bytes:
    """The header, its params or a value in it are another text."""
    header, data = header_of(body)
    text = draw(st.sampled_from(TEXTS) | st.text(max_size=20))
    where = draw(st.sampled_from(["header", "params", "value", "twice"]))
    if where == "header":
        return with_header(text.encode("utf-8", "surrogatepass"), data)
    metadata = header["__metadata__"]
    if where == "params":
        metadata["params"] = text
    elif where == "value":
        metadata[draw(st.sampled_from(sorted(metadata)))] = text
    else:  # a key that stands there twice
        raw = json.dumps(header)
        return with_header((raw[:-1] + f', "__metadata__": {text}}}').encode(), data)
    return with_header(header, data)


@st.composite
def lengths(draw: st.DrawFn, body: bytes) -> bytes:
    """The header's length is another, or a span of the data."""
    number = draw(st.sampled_from(LENGTHS))
    header, data = header_of(body)
    arrays = [header[name] for name in ARRAYS if isinstance(header.get(name), dict)]
    if not arrays or draw(st.booleans()):  # a mutant might have renamed them
        return struct.pack("<Q", number) + body[8:]
    tensor = draw(st.sampled_from(arrays))
    where = draw(st.sampled_from(["shape", "data_offsets"]))
    tensor[where] = [number] if where == "shape" else [0, number]
    return with_header(header, data)


@st.composite
def params(draw: st.DrawFn, body: bytes) -> bytes:
    """One param declares other sizes: huge ones, or ones that are off by a little."""
    header, data = header_of(body)
    entries = json.loads(header["__metadata__"]["params"])
    entry = draw(st.sampled_from(entries))
    key = draw(st.sampled_from(sorted(entry)))
    sizes = st.sampled_from(LENGTHS)
    change = {
        "shape": st.lists(sizes | st.integers(0, 9), max_size=17),
        "dtype": st.sampled_from(["float32", "float8_e4m3fn", "bool", "int64", "complex64", ""]),
        "name": st.text(max_size=9),
    }
    entry[key] = draw(change.get(key, sizes | st.integers(0, 40)))
    header["__metadata__"]["params"] = json.dumps(entries)
    return with_header(header, data)


@st.composite
def broken(draw: st.DrawFn, shapes: Shapes) -> bytes:
    """A part with one to three things wrong with it, and perhaps right checksums over that."""
    body = draw(good(shapes))
    for _ in range(draw(st.integers(0, 3))):
        if not is_container(body):
            body = draw(byte_mutants(body)) if body else body
            continue
        kind = draw(st.sampled_from([mutants, mutants, texts, lengths, params]))
        body = draw(kind(body))
        if draw(st.booleans()) and is_container(body):
            body = mended(body)
    return body


@st.composite
def wrapped(draw: st.DrawFn, body: bytes) -> bytes:
    """The bytes in a zstd frame, whose header might be wrong about them, or in several."""
    kind = draw(st.sampled_from(["frame", "no size", "two", "skippable", "in itself", "bomb"]))
    frame = zstandard.ZstdCompressor(write_content_size=kind != "no size").compress(body)
    if kind == "two":
        frame += frame
    elif kind == "skippable":
        frame = struct.pack("<II", 0x184D2A50, 4) + b"skip" + frame
    elif kind == "in itself":
        frame = zstandard.compress(frame)
    elif kind == "bomb":
        frame = zstandard.compress(body + bytes(draw(st.sampled_from([1 << 20, 1 << 24]))), 1)
    return draw(byte_mutants(frame)) if draw(st.booleans()) else frame


@st.composite
def bodies(draw: st.DrawFn, shapes: Shapes) -> bytes:
    """Anything that can come as a part."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    body = draw(broken(shapes))
    return draw(wrapped(body)) if draw(st.integers(0, 3)) == 0 else body


def chunks(body: bytes, sizes: list[int]) -> list[bytes]:
    """The body in chunks of these sizes, and the rest."""
    found: list[bytes] = []
    for size in sizes:
        found.append(body[:size])
        body = body[size:]
    return [*found, body]


def any_json() -> st.SearchStrategy[Any]:
    """A JSON value."""
    leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.just(1e300)
    keys = st.text(max_size=5)
    return st.recursive(
        leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3)
    )
