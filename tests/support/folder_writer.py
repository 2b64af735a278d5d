"""Write versions in the folder format that slime (since v0.3.1), vime and miles publish.

Written from the format's description with numpy, zstandard and safetensors only, so that the reader
is not tested against the project's own code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

INDEX = "model.safetensors.index.json"


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor, row-major, uint8 [bytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(name: str, data: bytes) -> str:
    """Return a checksum in hex, by its name in the index."""
    if name == "blake3":
        import blake3

        return blake3.blake3(data).hexdigest()
    return {
        "xxh3-128": lambda: xxhash.xxh3_128_hexdigest(data),
        "adler32": lambda: f"{zlib.adler32(data):08x}",
    }[name]()


def payload(encoding: str, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes to compress for one tensor, from its old and new bytes."""
    if encoding == "xor":
        return (old ^ new).tobytes()
    where = np.flatnonzero(old != new)
    count = np.array([where.size], "<u4")
    return count.tobytes() + where.astype("<u4").tobytes() + new[where].tobytes()


def write_version(
    root: Path,
    version: int,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    encoding: str = "xor",
    checksum_format: str = "xxh3-128",
    ranks: int = 2,
) -> Path:
    """Write the changes between two checkpoints as the folder of a version, and return it.

    Args:
        ranks: how many trainer ranks share the tensors, and write a file if they have changes.
    """
    shares: list[dict[str, np.ndarray[Any, Any]]] = [{} for _ in range(ranks)]
    sums: list[dict[str, str]] = [{} for _ in range(ranks)]
    for number, name in enumerate(sorted(new)):
        before, after = raw_bytes(old[name]), raw_bytes(new[name])
        if np.array_equal(before, after):
            continue
        frame = zstandard.ZstdCompressor(level=1).compress(payload(encoding, before, after))
        shares[number % ranks][name] = np.frombuffer(frame, np.uint8)
        sums[number % ranks][name] = checksum(checksum_format, after.tobytes())
    files = [(share, own) for share, own in zip(shares, sums, strict=True) if share]
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    weight_map = {}
    for number, (share, own) in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(share, folder / f"{file}.tmp", metadata=own)
        (folder / f"{file}.tmp").rename(folder / file)
        weight_map.update(dict.fromkeys(share, file))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum_format,
    }
    write_index(folder, metadata, weight_map)
    return folder


def write_checkpoint(
    root: Path, version: int, tensors: Mapping[str, torch.Tensor], files: int = 2
) -> Path:
    """Write a version that is a plain checkpoint, and return its folder."""
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(files):
        names = sorted(tensors)[number::files]
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_tensors({name: tensors[name].contiguous() for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_index(folder, {"total_size": total}, weight_map)
    return folder


def write_index(folder: Path, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> None:
    """Write the index, which comes last."""
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    (folder / f"{INDEX}.tmp").write_text(text)
    (folder / f"{INDEX}.tmp").rename(folder / INDEX)
