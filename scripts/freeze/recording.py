"""Store a recording as JSON, and compare two; tensors and their changes, reduced to hashes."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Recording = dict[str, Any]
Memory = dict[str, tuple[str, tuple[int, ...], NDArray[Any]]]
"""By name: dtype, shape, and the elements' bits, flat and in row-major order, copied."""


def bits_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the bits of a tensor's elements as unsigned integers [numel], copied."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    width = tensor.element_size()
    return raw.view(f"<u{width}").copy() if width <= 8 else raw.copy()


def memory_of(tensors: Mapping[str, torch.Tensor]) -> Memory:
    """Copy live tensors; those without memory (meta) are left out."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), bits_of(tensor))
        for name, tensor in tensors.items()
        if not tensor.is_meta
    }


def changes(before: Memory, after: Memory) -> dict[str, Any]:
    """Return for each tensor that changed the count and SHA-256 of what was written.

    Hashed are the flat indices (int64), then the old and the new bits, in the order of the indices,
    all little-endian. A tensor that came, went or has another dtype or shape is named so.
    """
    found: dict[str, Any] = {}
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found[name] = "gone" if name in before else "new"
            continue
        (*old_form, old), (*new_form, new) = before[name], after[name]
        if old_form != new_form:
            found[name] = f"{old_form} became {new_form}"
            continue
        where = np.flatnonzero(old != new).astype("<i8")
        if where.size:
            digest = hashlib.sha256(f"{name} {old_form}\n".encode())
            for piece in (where, old[where], new[where]):
                digest.update(piece.tobytes())
            found[name] = {"count": int(where.size), "sha256": digest.hexdigest()}
    return found


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return one line for each leaf that two recordings do not share."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        absent = object()
        return [
            line
            for key in keys
            for line in differences(one.get(key, absent), other.get(key, absent), f"{path}/{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for n, (a, b) in pairs for line in differences(a, b, f"{path}/{n}")]
    return [] if one == other else [f"{path}: {_brief(one)} became {_brief(other)}"]


def _brief(value: Any) -> str:
    return "nothing" if type(value) is object else repr(value)[:100]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--compare``."""
    parser.add_argument("--json", type=Path, help="where to write the recording")
    parser.add_argument("--compare", type=Path, help="an earlier recording; exit 1 if they differ")


def finish(recording: Recording, arguments: argparse.Namespace, only: Sequence[str] = ()) -> int:
    """Write and compare a recording as the options say; returns the exit status.

    Args:
        only: what was recorded, if not all: the rest of the earlier recording is left out.
    """
    if arguments.json:
        arguments.json.write_text(json.dumps(recording, indent=1, sort_keys=True) + "\n")
    if not arguments.compare:
        return 0
    earlier = json.loads(arguments.compare.read_text())
    if only:
        earlier = {key: value for key, value in earlier.items() if key in only}
    found = differences(earlier, json.loads(json.dumps(recording)))
    for line in found:
        print(line)
    print(f"{len(found)} differences" if found else "equal")
    return 1 if found else 0
