"""A simulated trainer that changes weights at random and writes containers by hand.

The containers are written from the table of the wire format with numpy, torch and safetensors only,
so that the engine's reader is not tested against the project's own writer.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.torch import save

from engine_ext.format.digest import Digest, change_digest, tensor_digest
from engine_ext.log import open_log
from tests.support import independent_gap8

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Trainer:
    """Checkpoint tensors that change step by step.

    Attributes:
        tensors: name -> tensor; what the engine must hold after the last step's commit.
        version: version of `tensors`.
        old: name -> tensor before the last step.
    """

    tensors: dict[str, torch.Tensor]
    version: int = 0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))
    old: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, density: float = 0.02, only: str = "") -> dict[str, torch.Tensor]:
        """Change some elements of every tensor, or of those with `only` in their names.

        Returns:
            name -> int64 [nnz] ascending indices.
        """
        changed = {}
        self.old = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if only not in name:
                continue
            count = max(1, round(density * tensor.numel()))
            where = torch.randperm(tensor.numel(), generator=self.generator)[:count].sort().values
            fresh = tensor.clone()
            bits = fresh.view(-1).view(BITS[tensor.dtype.itemsize])
            bits[where] ^= torch.randint(1, 4, (count,), generator=self.generator).to(bits.dtype)
            self.tensors[name] = fresh
            changed[name] = where
        self.version += 1
        return changed

    def metadata(self) -> dict[str, str]:
        """Return a part's metadata with the versions of the last step."""
        return {
            "current_version": str(self.version),
            "base_version": str(self.version - 1),
            "sync_id": uuid.uuid4().hex,
        }


def container(
    tensors: Mapping[str, torch.Tensor],
    changed: Mapping[str, torch.Tensor | None],
    *,
    encoding: str = "deltas",
    metadata: Mapping[str, str] | None = None,
    checksum: str = "xxh3",
    manifest_checksum: bool = False,
    old: Mapping[str, torch.Tensor] | None = None,
) -> bytes:
    """Encode one part by the table of the wire format.

    Args:
        tensors: the new tensors.
        changed: name -> int64 [nnz] indices to send, or None for a dense param.
        encoding: ``indices``, ``deltas``, ``deltas_zstd``, ``gap8_exp`` or ``gap8_ulp``.
        metadata: further metadata.
        checksum: ``xxh3``, or ``slime`` for the decimal form.
        manifest_checksum: whether to add one.
        old: the old tensors; only ``gap8_ulp`` needs them.
    """
    streams, values, params = [], [], []
    start = count = 0
    for name, indices in changed.items():
        tensor = tensors[name]
        flat = tensor.reshape(-1)
        width, raw = 0, b""
        if indices is not None:
            width, raw = encode(indices.numpy(), encoding)
            flat = flat[indices]
        streams.append((width, raw))
        values.append(flat)
        params.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "pos_start": start,
                "pos_end": start + len(raw),
                "pos_width": width,
                "val_start": count,
                "val_end": count + flat.numel(),
            }
        )
        start, count = start + len(raw), count + flat.numel()
    meta = {"encoding": encoding, "params": json.dumps(params), **(metadata or {})}
    position_bytes = b"".join(raw for _, raw in streams)
    value_tensor = torch.cat(values) if values else torch.empty(0, dtype=torch.uint8)
    if encoding.startswith("gap8"):
        position_bytes = independent_gap8.positions(streams)
    if encoding == "gap8_exp":
        value_tensor = as_tensor(independent_gap8.exponents(map(bits, values)))
    if encoding == "gap8_ulp":
        assert old is not None
        before = [bits(old[name].reshape(-1)[where]) for name, where in changed.items()]
        after = list(map(bits, values))
        pairs = list(zip(before, after, strict=True))
        value_tensor = as_tensor(independent_gap8.differences(pairs))
        change = (
            change_digest(name, None if where is None else where.numpy(), *pair)
            for (name, where), pair in zip(changed.items(), pairs, strict=True)
        )
        meta["digest_part"] = sum(change, start=Digest.ZERO).hex()
    if any(key in meta for key in ("digest_part", "digest_before", "digest_after")):
        meta.setdefault("digest_algorithm", "multilinear-1")
    position_tensor = as_tensor(position_bytes)
    meta["checksum"] = (
        xxh3_of(position_tensor, value_tensor)
        if checksum == "xxh3"
        else slime_of(position_tensor, value_tensor)
    )
    if manifest_checksum:
        lines = "".join(f"{key}={meta[key]}\n" for key in sorted(meta))
        meta["manifest_checksum"] = "xxh3_128:" + xxhash.xxh3_128_hexdigest(lines.encode())
    file = save({"__positions__": position_tensor, "__values__": value_tensor}, metadata=meta)
    return zstandard.compress(file, 1) if encoding == "deltas_zstd" else file


def edited(part: bytes, /, **metadata: str | None) -> bytes:
    """Return the container with changed metadata; None removes a key."""
    length = int.from_bytes(part[:8], "little")
    header = json.loads(part[8 : 8 + length])
    for key, value in metadata.items():
        header["__metadata__"].pop(key, None)
        if value is not None:
            header["__metadata__"][key] = value
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + part[8 + length :]


def as_tensor(data: bytes) -> torch.Tensor:
    """Return the bytes as a uint8 tensor [bytes]."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def encode(where: np.ndarray, encoding: str) -> tuple[int, bytes]:
    """Return (pos_width, bytes) of ascending flat indices."""
    if encoding.startswith("gap8"):
        return independent_gap8.gap_stream(where)
    if encoding == "indices":
        return 4, where.astype("<i4").tobytes()
    gaps = np.diff(where, prepend=-1) - 1
    dtype = "<u2" if gaps.size == 0 or gaps.max() < 1 << 16 else "<u4"
    return np.dtype(dtype).itemsize, gaps.astype(dtype).tobytes()


def xxh3_of(positions: torch.Tensor, values: torch.Tensor) -> str:
    data = positions.numpy().tobytes() + values.view(torch.uint8).numpy().tobytes()
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def slime_of(positions: torch.Tensor, values: torch.Tensor) -> str:
    p = int(torch.hash_tensor(positions).item()) if positions.numel() else 0
    v = int(torch.hash_tensor(values).item()) if values.numel() else 0
    return str(p ^ (v << 1))


def split(changed: Mapping[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """Distribute the params over some parts."""
    names = list(changed)
    return [{name: changed[name] for name in names[k::parts]} for k in range(parts)]


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bit patterns as unsigned integers [numel]."""
    flat = tensor.reshape(-1).view(BITS[tensor.element_size()]).numpy()
    return flat.view(f"u{tensor.element_size()}")


def write_log(
    log: str | Path,
    trainer: Trainer,
    versions: int,
    encodings: Sequence[str] = ("deltas_zstd", "gap8_ulp", "indices"),
) -> None:
    """Write versions to a log, in parts of several encodings, with the model's digests."""
    for number in range(versions):
        before = model_digest(trainer.tensors).hex()
        groups = split(trainer.step(), 2)
        metadata = {**trainer.metadata(), "num_parts": "2", "digest_before": before}
        metadata["digest_after"] = model_digest(trainer.tensors).hex()
        with contextlib.closing(open_log(log).writer()) as writer:
            draft = writer.begin(trainer.version)
            for part, changed in enumerate(groups):
                draft.add(
                    container(
                        trainer.tensors,
                        changed,
                        encoding=encodings[number % len(encodings)],
                        metadata={**metadata, "part": str(part)},
                        manifest_checksum=True,
                        old=trainer.old,
                    )
                )
            draft.finish()


def write_unproven(log: str | Path, trainer: Trainer, *, full: bool = False) -> None:
    """Write one version without the model's digests, as a sender does that knows no engine."""
    sent: Mapping[str, torch.Tensor | None] = trainer.step()
    metadata = trainer.metadata()
    if full:
        sent = dict.fromkeys(trainer.tensors)
        metadata = {**metadata, "full": "true"}
        del metadata["base_version"]
    with contextlib.closing(open_log(log).writer()) as writer:
        draft = writer.begin(trainer.version)
        draft.add(container(trainer.tensors, sent, metadata=metadata))
        draft.finish()


def remove_versions(log: str | Path, *versions: int) -> None:
    """Remove some versions of a log, without any all, so that their numbers are free again."""
    opened = open_log(log)
    gone = [one for one in opened.listing().entries if not versions or one.version in versions]
    opened.store.delete([entry.folder.name for entry in gone])
    opened.store.delete(opened.store.list("claims"))  # else the next writer settles what they name


def model_digest(tensors: Mapping[str, torch.Tensor]) -> Digest:
    """Return the digest of a whole checkpoint."""
    return sum((tensor_digest(n, bits(t)) for n, t in tensors.items()), start=Digest.ZERO)
