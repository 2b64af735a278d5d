"""Send what changed between two state dicts to an engine: the whole protocol in one small file.

It imports nothing of this project, to be read in five minutes and ported in an afternoon::

    client = httpx.Client(base_url="http://engine:8000", timeout=600)
    sender = Sender(client, base=checkpoint_tensors)  # what the engine has loaded
    train(batch)
    sender.sync(model.state_dict())  # after every step

    sender.close()

Names, shapes and dtypes must be the checkpoint's; leave out aliases of tied tensors. A sender opens
a run, an id of its weights' lineage: from the first sync to `close` the engine takes parts of that
run only, and a version is known by run and number. (The `delta_sender` package, for production,
also proves by digests that engine and trainer hold the same bytes, and so needs no `version`.)
"""

import json
import os
import socket
import uuid
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import torch
import zstandard
from xxhash import xxh3_128_hexdigest as xxh3

# Name, new tensor, and the ascending flat (row-major) indices that are sent; None for all of them.
Change = tuple[str, torch.Tensor, Any]
PART_BYTES = 1 << 30  # of data in a part, about; an engine accepts 4 GiB by default
# The manifest has torch's names of dtypes, safetensors has codes.
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
CODES |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
CODES |= {f"{u}int{n}": f"{u or 'i'}{n}".upper() for u in ("", "u") for n in (8, 16, 32, 64)}


class SyncError(Exception):
    """The engine refused a request; the message is its answer."""


class BaseError(SyncError):
    """The engine does not hold `Sender.base`; only a full sync would help."""


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for n, t in tensors.items()}


def bits(tensor: torch.Tensor) -> Any:
    """Return the elements as unsigned integers, [numel]: a NaN equals itself, -0.0 is not 0.0."""
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"<u{tensor.itemsize}")


def compare(base: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> list[Change]:
    """Find the changed elements of each tensor that has any."""
    kinds = [{(name, t.dtype, t.shape) for name, t in each.items()} for each in (base, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"not the names, dtypes and shapes of the base: {kinds[0] ^ kinds[1]}")
    changes = [(name, t, np.flatnonzero(bits(base[name]) != bits(t))) for name, t in new.items()]
    return [change for change in changes if change[2].size]


def encode_part(changes: list[Change], metadata: Mapping[str, str]) -> bytes:
    """Build a ``deltas_zstd`` part of one dtype: a safetensors file of two tensors, compressed."""
    params, positions, values, dtype, count = [], bytearray(), bytearray(), "uint8", 0
    for name, tensor, indices in changes:
        dtype, new = str(tensor.dtype).removeprefix("torch."), bits(tensor)
        start = {"pos_start": len(positions), "val_start": count}  # in bytes; in elements
        width = 0  # dense: every element in row-major order, and no positions
        if indices is not None:
            # A position is the number of unchanged elements since the last changed one: indices
            # 2, 3, 7 become 2, 0, 3. Each has 2 bytes, or 4 if one of the tensor's needs them.
            gaps = np.diff(indices, prepend=-1) - 1
            if gaps.max() >= 1 << 32:
                raise ValueError(f"{name}: a gap of {gaps.max()} elements; send the tensor dense")
            width = 2 if gaps.max() < 1 << 16 else 4
            positions += gaps.astype(f"<u{width}").tobytes()
            new = new[indices]
        values += new.tobytes()
        count += new.size
        # The slices of the tensors follow each other, in this order and without gaps.
        end = {"pos_end": len(positions), "val_end": count, "pos_width": width}
        params.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), **start, **end})
    # All metadata are strings. `checksum` covers the data, positions first; `manifest_checksum`
    # covers all other metadata, as lines "key=value\n" sorted by key.
    metadata = {"encoding": "deltas_zstd", "params": json.dumps(params), **metadata}
    metadata["checksum"] = f"xxh3_128:{xxh3(positions + values)}"
    lines = "".join(f"{key}={metadata[key]}\n" for key in sorted(metadata))
    metadata["manifest_checksum"] = f"xxh3_128:{xxh3(lines.encode())}"
    # A safetensors file: the header's length in 8 bytes, the header in JSON, padded with spaces to
    # align the values, and the data, from whose start offsets count. Integers are little-endian.
    mid, size = len(values), len(positions)
    header: dict[str, Any] = {"__metadata__": metadata}
    header["__values__"] = {"dtype": CODES[dtype], "shape": [count], "data_offsets": [0, mid]}
    header["__positions__"] = {"dtype": "U8", "shape": [size], "data_offsets": [mid, mid + size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return zstandard.compress(len(text).to_bytes(8, "little") + text + values + positions, 1)


class Sender:
    """Keeps one engine, which holds `base` as `version` (0 if freshly loaded), up to date.

    `client` has the engine's address and, if it wants a token, the header ``Authorization``.
    """

    def __init__(self, client: httpx.Client, base: Mapping[str, torch.Tensor], version: int = 0):
        self.client, self.base, self.version, self._tried = client, copies(base), version, version
        self.run, self._host = uuid.uuid4().hex, socket.gethostname()
        self._is_owner = self._has_sent = False

    def close(self) -> None:
        """Let others claim the engine; it drops what it has of an unfinished sync."""
        self._own("release")

    def _own(self, action: str) -> Any:
        fields = {"action": action, "run": self.run, "epoch": 1, "host": self._host}
        body = json.dumps({**fields, "pid": os.getpid()}).encode()
        return self._request("POST", "/delta_run", body, "application/json")

    def sync(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Bring the engine to `tensors` and return their version; if it raises, call it again."""
        new = copies(tensors)
        if not self._is_owner:
            held = self._own("claim")
            if held["version"] != self.version:
                self.close()
                raise BaseError(f"the engine is at {held['version']}, the base at {self.version}")
            self._is_owner = True
        try:
            self._send(compare(self.base, new), base_version=str(self.version))
        except BaseError:
            # Only what this run has sent is replaced, or what a restarted engine has loaded.
            held = self._request("GET", "/delta_status")["version"]
            if held["run"] != self.run and not (held["loaded"] and self._has_sent):
                raise
            self._tried = max(self._tried, held["number"])  # versions do not go back
            self._send([(name, tensor, None) for name, tensor in new.items()], full="true")
        # The base moves only now, or a change that never arrives would silently stay lost. If only
        # the answer is lost, the engine is a version ahead: the next sync gets a 409 and sends all.
        self.base, self.version, self._has_sent = new, self._tried, True
        return self.version

    def _send(self, changes: list[Change], **start: str) -> None:
        """Post the parts of a sync. The engine writes them all when the last one has arrived."""
        self._tried += 1  # never used again, so that a version stands for one set of weights
        # An engine refuses (422) tensors that its loader skips, and its plan says which these are.
        plan = self._request("GET", "/delta_status?plan=true")["plan"] or []
        ignored = {row["name"] for rank in plan for row in rank if row["status"] == "ignored"}
        parts: defaultdict[Any, list[Change]] = defaultdict(list)
        nbytes = 0
        for name, tensor, indices in changes:
            if name not in ignored:
                nbytes += (tensor if indices is None else indices).nbytes
                parts[tensor.dtype, nbytes // PART_BYTES].append((name, tensor, indices))
        bodies = [*parts.values()] or [[]]  # an empty part advances the version
        run = {"run": self.run, "run_epoch": "1", "run_owner": f"{self._host}:{os.getpid()}"}
        sync = {"sync_id": uuid.uuid4().hex, "current_version": str(self._tried), **run, **start}
        for number, part in enumerate(bodies):
            metadata = {**sync, "part": str(number), "num_parts": str(len(bodies))}
            answer = self._request("POST", "/update_weights_delta", encode_part(part, metadata))
            if answer["status"] != ("staged" if number + 1 < len(bodies) else "committed"):
                raise BaseError(f"the engine has had this part from another sync: {answer}")

    def _request(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream"
    ) -> Any:
        answer = self.client.request(method, path, content=body, headers={"Content-Type": kind})
        if answer.status_code == 200:
            return answer.json()
        # "uncertain": a write failed half-way, and only a full sync repairs that. Other refusals
        # are not repaired by one: another run's engine, an unfinished sync that keeps others out.
        full = ('"VersionConflict"', '"BaseMismatch"', '"uncertain"')
        error = BaseError if any(word in answer.text for word in full) else SyncError
        raise error(f"HTTP {answer.status_code}: {answer.text[:1000]}")
