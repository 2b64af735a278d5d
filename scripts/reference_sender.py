"""Reference sender: compare a trainer's weights with what the engine has, and send the changes.

It needs the core of `engine_ext` (no engine), httpx, tenacity and rich. In a trainer::

    with DeltaSender("http://engine:8000", base=checkpoint_tensors) as sender:
        for batch in data:
            train(batch)
            print(sender.sync(model.state_dict().items()).wire_bytes)

As a program it sends the difference between two Hugging Face checkpoints; see ``--help``.

The one rule: the snapshot is what the engine holds. It moves only once the engine has answered
that it committed, and by exactly the bytes sent. Whatever fails, the next sync sends all of it.

The engine's plan, read before the first sync and before every full one, says which tensors the
engine ignores and which its digest covers. Ignored ones are left out of every sync. The digests
let engine and sender find out that they do not hold the same bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from tenacity import RetryCallState, retry, retry_if_exception_type
from tenacity.stop import stop_after_attempt, stop_before_delay
from tenacity.wait import wait_random_exponential
from torch.multiprocessing.reductions import StorageWeakRef

from engine_ext.digest import Digest, change_digest, tensor_digest
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype, torch_bits_dtype
from engine_ext.wire.part import ParamDelta, encode_part
from engine_ext.wire.positions import ENCODINGS, encode_positions

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Changes = dict[str, ParamDelta]  # by name in the snapshot; private copies


class SyncFailed(Exception):
    """The sync did not commit, as far as is known; snapshot and version are as before it.

    Or else it did commit, and the message says that the engine's digest then was another than the
    sender's; the next sync is a full one.

    Attributes:
        status: HTTP status of the last answer, None if none came. Where no answer to the last
            part came, the engine may have committed; the next sync finds out and sets it right.
        error: The engine's ``error`` object, {} if the answer was not the engine's.
    """

    def __init__(
        self, message: str, status: int | None = None, error: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = error or {}


class _Unreachable(SyncFailed):
    """No answer, or only a proxy's. Parts are idempotent, so the request may be repeated."""


class _Busy(SyncFailed):
    """Another sync has parts staged; ``error["retry_after"]`` is in seconds."""


@dataclass(frozen=True)
class SyncReport:
    """One sync. The model is what is sent when all is sent, so without the ignored tensors."""

    version: int
    base_version: int
    nnz: int  # elements sent; a dense param counts with all of its elements
    numel: int  # elements of the model
    full_bytes: int  # bytes of the model
    wire_bytes: int  # bytes of the request bodies, each counted once
    parts: int
    encode_ms: float  # everything but posting: reading tensors, comparing, hashing, encoding
    post_ms: float  # posting the parts, with retries and waits
    status: str  # "committed" or "already_applied"
    full: bool
    digest: str | None  # of the model, now; None where no digest is kept
    engine: dict[str, Any]  # the engine's last answer

    @property
    def density(self) -> float:
        return self.nnz / max(1, self.numel)


class DeltaSender:
    """Keeps an engine's weights in step with a trainer's. Not thread-safe.

    Tensors come as (name, tensor) in checkpoint coordinates: unsharded, and named as in the
    Hugging Face checkpoint. They are read one by one, so a generator that gathers each when asked
    will do. CUDA tensors are brought to the CPU whole and compared there: simple, not fastest.
    Of tied tensors (one storage, several names) one copy is kept; if they ever differ, that is a
    ValueError. So do not yield views of a buffer that is refilled in between. They are sent under
    every name that the engine holds; if it has no plan, under the first.

    Host memory: the snapshot (the model's size), the changes until they are committed (8 bytes
    plus the itemsize for each element), and about two parts.

    Args:
        url: The engine's root, ``http://host:port``.
        base: What the engine holds now; copied.
        base_version: The version the engine is at.
        encoding: One of `ENCODINGS`.
        bucket_bytes: Most bytes of positions and values in one part, before compression. A param
            is never split: a larger one travels alone.
        digest: Keep the model's digest, and send digests along if the engine has a plan.
        api_key: Bearer token.
        pause_mode, flush_cache: As the endpoint takes them.
        timeout: Seconds, for one request and for waiting until another sync is out of the way.
        client: Used in place of an own one, and not closed.

    Attributes:
        version: The version that the engine acknowledged last.
    """

    def __init__(
        self,
        url: str,
        base: NamedTensors,
        *,
        base_version: int = 0,
        encoding: str = "deltas_zstd",
        bucket_bytes: int = 256 << 20,
        digest: bool = True,
        api_key: str | None = None,
        pause_mode: str = "keep",
        flush_cache: bool = True,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
    ) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding {encoding!r} is not one of {', '.join(ENCODINGS)}")
        self.version = base_version
        self._encoding, self._bucket_bytes, self._timeout = encoding, bucket_bytes, timeout
        self._url, self._with_digest = url.rstrip("/"), digest
        self._query = {"pause_mode": pause_mode, "flush_cache": "true" if flush_cache else "false"}
        self._headers = {"Content-Type": "application/octet-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._owns_client, self._client = client is None, client or httpx.Client(timeout=timeout)
        self._names: list[str] = []  # what is sent when all is sent; empty until the plan is read
        self._digested: set[str] = set()  # names that the digest covers
        self._digest: Digest | None = None  # of the snapshot
        self._planned = False  # the engine had a plan when it was last asked
        self._suspect = False  # the engine's last digest was not ours
        self._started = self._post_s = 0.0  # when this sync began, and its seconds of posting
        self._snapshot: dict[str, ParamDelta] = {}  # dense: what the engine holds
        self._tied: dict[str, str] = {}  # further name -> name in the snapshot
        for name, tensor, first in _with_ties(base):
            if first is None:
                self._snapshot[name] = self._keep(_to_bits(name, tensor))
            else:
                self._tied[name] = first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the HTTP client, if it is an own one."""
        if self._owns_client:
            self._client.close()

    def sync(self, tensors: NamedTensors) -> SyncReport:
        """Send what changed since the last sync; if nothing did, one empty part.

        If the engine turns out to hold something else (it was restarted, a digest disagrees, it
        committed a sync whose answer was lost) or to be ``uncertain``, the whole model is sent
        instead, once.

        Raises:
            SyncFailed: The engine refused, could not be reached, or holds other bytes afterwards.
            ValueError: Names, shapes or dtypes are not the base's. Nothing was sent.
        """
        changes, version = self._read(tensors), self.version
        try:
            return self._send(changes, version + 1, full=self._suspect)
        except SyncFailed as failed:
            if self._suspect or not _calls_for_full(failed):
                raise
            if isinstance(actual := failed.error.get("actual"), int):
                version = max(version, actual)
        return self._send(changes, version + 1, full=True)

    def sync_full(self, tensors: NamedTensors) -> SyncReport:
        """Send every tensor dense, whatever the engine holds. Raises as `sync`."""
        return self._send(self._read(tensors), self.version + 1, full=True)

    def _read(self, tensors: NamedTensors) -> Changes:
        """Find out what is not as in the snapshot."""
        self._started, self._post_s = time.perf_counter(), 0.0
        changes: Changes = {}
        seen: set[str] = set()
        for name, tensor, first in _with_ties(tensors):
            known = name in self._snapshot or name in self._tied
            kept = self._kept(name if known else first or name)
            if kept not in self._snapshot:
                raise ValueError(f"{name}: not in the base")
            old, new = self._snapshot[kept], replace(_to_bits(name, tensor), name=kept)
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise ValueError(
                    f"{name}: {new.dtype} {new.shape}, but {old.dtype} {old.shape} in the base"
                )
            if kept in seen:
                if not np.array_equal(new.values, self._image(kept, changes).values):
                    raise ValueError(f"{name}: differs from {kept}, which it is tied to or repeats")
                continue
            seen.add(kept)
            indices = np.flatnonzero(new.values != old.values)
            if indices.size:
                sparse = replace(new, indices=indices, values=new.values[indices])
                dense = self._payload_bytes(sparse) >= new.values.nbytes
                changes[kept] = replace(new, values=new.values.copy()) if dense else sparse
        if missing := self._snapshot.keys() - seen:
            raise ValueError(f"missing, but in the base: {', '.join(sorted(missing))}")
        return changes

    def _kept(self, name: str) -> str:
        """The name in the snapshot of what is sent under `name`."""
        return self._tied.get(name, name)

    def _image(self, kept: str, changes: Changes) -> ParamDelta:
        """A tensor of the snapshot with `changes` made, dense; to read only, it may be no copy."""
        old, change = self._snapshot[kept], changes.get(kept)
        if change is None or change.indices is None:
            return change or old
        values = old.values.copy()
        values[change.indices] = change.values
        return replace(old, values=values)

    def _payload_bytes(self, delta: ParamDelta) -> int:
        """Bytes of a param's positions and values, before compression."""
        if delta.indices is None:
            return delta.values.nbytes
        return encode_positions(self._encoding, delta.indices)[0].nbytes + delta.values.nbytes

    def _learn_plan(self) -> None:
        """Ask for the engine's plan; choose what is sent, and compute the snapshot's digest.

        A name that the plan lacks is sent all the same, for the engine to refuse it, unless it is
        tied to one that the plan has.
        """
        try:
            plan = self._ask_plan()
        except SyncFailed as failed:
            if failed.status != 404:
                raise
            plan = None
        first_time, self._planned = not self._names, plan is not None
        rows = [row for rank in plan or [] for row in rank]
        held = {row["name"] for row in rows if row["status"] != "ignored"}
        known = {self._kept(row["name"]) for row in rows}
        names = [*self._snapshot, *self._tied]
        self._names = [n for n in names if n in held or (n in self._snapshot and n not in known)]
        self._digested = {row["name"] for row in rows if row["digested"]}
        lacking = sorted(self._digested.difference(self._names))
        self._digest = None
        if plan is not None and self._with_digest and not lacking:
            threads, tensors = os.cpu_count() or 1, ((n, self._old(n)) for n in self._digested)
            digests = (tensor_digest(name, values, threads=threads) for name, values in tensors)
            self._digest = sum(digests, start=Digest.ZERO)
        if first_time:
            if ignored := self._snapshot.keys() - map(self._kept, self._names):
                logger.warning("left out, as the engine ignores them: %s", sorted(ignored))
            if lacking:
                logger.warning("no digests, as the engine's cover tensors not in base: %s", lacking)

    def _ask_plan(self) -> Any:
        """For each rank a list of rows, one per checkpoint tensor; None if there is no plan."""
        return self._request("GET", "/delta_status", {"plan": "true"}).get("plan")

    def _old(self, name: str) -> np.ndarray[Any, Any]:
        return self._snapshot[self._kept(name)].values

    def _change(self, names: Iterable[str], changes: Changes) -> Digest:
        """What `changes` of these tensors add to the digest."""
        total = Digest.ZERO
        for name in self._digested.intersection(names):
            if change := changes.get(self._kept(name)):
                where = slice(None) if change.indices is None else change.indices
                total += change_digest(name, change.indices, self._old(name)[where], change.values)
        return total

    def _parts(self, params: dict[str, ParamDelta]) -> list[list[str]]:
        """Group names into parts of one dtype and at most `bucket_bytes`, or of one param."""
        parts: list[list[str]] = []
        filling: dict[str, tuple[list[str], int]] = {}  # by dtype: a part and its bytes
        for name in self._names:
            if param := params.get(self._kept(name)):
                size = self._payload_bytes(param)
                part, filled = filling.get(param.dtype, ([], 0))
                if not part or filled + size > self._bucket_bytes:
                    part, filled = [], 0
                    parts.append(part)
                part.append(name)
                filling[param.dtype] = part, filled + size
        return parts or [[]]

    def _send(self, changes: Changes, version: int, *, full: bool) -> SyncReport:
        """Encode and post part by part; once committed, move snapshot and digest by `changes`."""
        # Before a full sync again: the engine may be another, and our digest may be wrong.
        # Without a plan too: an engine that has no checkpoint gets one with its first sync.
        if full or not self._planned:
            self._learn_plan()
        parts = self._parts(self._snapshot if full else changes)
        sync_id, base_version = uuid.uuid4().hex, self.version
        before, after = self._digest, self._digest or Digest.ZERO
        nnz = wire_bytes = 0
        answer: dict[str, Any] = {}
        for number, names in enumerate(parts):
            last = number == len(parts) - 1
            digests: dict[str, Any] = {}
            if before is not None:
                change = self._change(names, changes)
                after += change
                if not full:  # where it is, nobody knows what the engine holds
                    digests.update(digest_part=change.hex(), digest_before=before.hex())
                if last:
                    digests.update(digest_after=after.hex())
            kept = [self._kept(name) for name in names]
            deltas = [self._image(k, changes) if full else changes[k] for k in kept]
            body = encode_part(
                [replace(delta, name=name) for delta, name in zip(deltas, names, strict=True)],
                encoding=self._encoding,
                current_version=version,
                base_version=None if full else base_version,
                sync_id=sync_id,
                part=number,
                num_parts=len(parts),
                full=full,
                **digests,
            )
            post_start = time.perf_counter()
            answer = self._deliver(body, version, number, last)
            self._post_s += time.perf_counter() - post_start
            nnz += sum(delta.nnz for delta in deltas)
            wire_bytes += len(body)
        self._advance(changes)
        self._digest = None if before is None else after
        self.version = version  # last: if this is interrupted, a full sync follows
        theirs = answer.get("digest")
        self._suspect = before is not None and theirs not in (None, after.hex())
        if self._suspect:
            raise SyncFailed(
                f"version {version} is committed, but the engine does not hold what it should: "
                f"its digest is {theirs}, not {after}; the next sync will be full",
                200,
            )
        return SyncReport(
            version=version,
            base_version=base_version,
            nnz=nnz,
            numel=sum(self._old(name).size for name in self._names),
            full_bytes=sum(self._old(name).nbytes for name in self._names),
            wire_bytes=wire_bytes,
            parts=len(parts),
            encode_ms=(time.perf_counter() - self._started - self._post_s) * 1e3,
            post_ms=self._post_s * 1e3,
            status=answer["status"],
            full=full,
            digest=None if before is None else after.hex(),
            engine=answer,
        )

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        """A private copy, for the snapshot."""
        return replace(dense, values=dense.values.copy())

    def _advance(self, changes: Changes) -> None:
        """Make the committed `changes` in the snapshot."""
        for kept, change in changes.items():
            where = slice(None) if change.indices is None else change.indices
            self._snapshot[kept].values[where] = change.values

    def _deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Post one part until it is taken or refused; returns the engine's answer."""
        when_free = retry(
            retry=retry_if_exception_type(_Busy),
            wait=_retry_after,
            stop=stop_before_delay(self._timeout),
            reraise=True,
        )
        answer = when_free(self._request)("POST", "/update_weights_delta", self._query, body)
        # A part may be that of an earlier sync whose answer was lost.
        expected = ("committed" if last else "staged", "already_applied")
        if answer.get("status") not in expected or (last and answer.get("version") != version):
            raise SyncFailed(f"part {part} of version {version} was answered {answer}", 200)
        return answer

    @retry(
        retry=retry_if_exception_type(_Unreachable),
        wait=wait_random_exponential(multiplier=0.5, max=4.0),
        stop=stop_after_attempt(8),
        reraise=True,
    )
    def _request(
        self, method: str, path: str, query: dict[str, str], body: bytes | None = None
    ) -> dict[str, Any]:
        url, headers = self._url + path, self._headers
        try:
            answer = self._client.request(method, url, params=query, headers=headers, content=body)
        except httpx.TransportError as error:
            raise _Unreachable(f"{url}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise _refusal(answer)
        return _json_object(answer)


def _with_ties(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yield (name, tensor, earlier name of the same storage and view, if any).

    A weak reference keeps a freed storage's identity, not its memory, from being reused.
    """
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        first = names.setdefault((storage, *view), name)
        yield name, tensor, first if first != name and tensor.numel() else None


def _to_bits(name: str, tensor: torch.Tensor) -> ParamDelta:
    """The tensor as a dense param: unsigned ints of its dtype's width, [numel], row-major.

    A contiguous CPU tensor is not copied.
    """
    dtype = NAME_OF_TORCH.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name}: deltas do not carry {tensor.dtype}")
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch_bits_dtype(tensor.dtype))
    return ParamDelta(name, dtype, tuple(tensor.shape), None, bits.numpy().view(bits_dtype(dtype)))


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _refusal(response: httpx.Response) -> SyncFailed:
    """The exception for an answer other than 200; its class says whether a retry may help."""
    status, error = response.status_code, _json_object(response).get("error")
    if not isinstance(error, dict):
        kind = _Unreachable if status in (502, 503, 504) else SyncFailed
        return kind(f"HTTP {status}: {response.text[:200]}", status)
    message = f"HTTP {status}: {error.get('type')}: {error.get('message')}"
    if error.get("type") != "SyncInProgress":
        return SyncFailed(message, status, error)
    header = response.headers.get("Retry-After", "")
    seconds = max(0.1, float(header)) if header.isdecimal() else 1.0
    return _Busy(message, status, {**error, "retry_after": seconds})


def _retry_after(state: RetryCallState) -> float:
    failed = state.outcome.exception() if state.outcome else None
    return float(failed.error["retry_after"]) if isinstance(failed, _Busy) else 0.0


def _calls_for_full(failed: SyncFailed) -> bool:
    """Whether a sync of the whole model can help: the engine's bytes are not the snapshot's."""
    conflict = failed.error.get("type") in ("VersionConflict", "BaseMismatch")
    return conflict or failed.error.get("engine_state") == "uncertain"


# ---- command line ----------------------------------------------------------------------------


class CheckpointSender(DeltaSender):
    """Sends one sync between two checkpoints mapped from disk, to an engine or into a folder.

    The mapped base is the snapshot: it is not copied, and not advanced after the one sync.
    """

    save: Path | None = None  # write weight_v000012/rank0_flush000.safetensors in it, not post
    dry_run: bool = False

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        return dense

    def _advance(self, changes: Changes) -> None:
        pass

    def _ask_plan(self) -> Any:
        return super()._ask_plan() if self._url else None

    def _deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        if self.dry_run:
            return {"status": "dry run"}
        if self.save is None:
            return super()._deliver(body, version, part, last)
        final = self.save / f"weight_v{version:06d}"
        partial = final.with_name(f".{final.name}.partial")
        if final.exists():
            raise FileExistsError(f"{final} exists")
        if part == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        (partial / f"rank0_flush{part:03d}.safetensors").write_bytes(body)
        if last:
            partial.rename(final)  # a reader of the folder sees all parts or none
        return {"status": f"saved in {final}"}


def checkpoint_entries(folder: Path) -> list[tuple[Path, str]]:
    """The (file, tensor name) pairs of a Hugging Face checkpoint, ordered by file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted((folder / file, name) for name, file in weight_map.items())
    entries = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            entries += [(path, name) for name in file.offset_keys()]
    if not entries:
        raise FileNotFoundError(f"{folder}: no {index.name} and no tensors in *.safetensors")
    return entries


def read_checkpoint(folder: Path, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor), mapped from the files and not read; moves a progress bar on."""
    entries = progress.track(checkpoint_entries(folder), description=folder.name)
    for path, group in groupby(entries, key=lambda entry: entry[0]):
        with safe_open(path, framework="pt") as file:
            for _, name in group:
                yield name, file.get_tensor(name)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Send the difference between two Hugging Face checkpoints (safetensors) to an "
        "engine that holds the first one, as a sparse weight update.",
        epilog="Exit status: 0 done, 1 the engine refused or could not be reached, 2 bad usage or "
        "unreadable or unlike checkpoints, 130 interrupted.",
    )
    add = parser.add_argument
    add("--base", type=Path, metavar="DIR", help="checkpoint that the engine holds now")
    add("--target", type=Path, metavar="DIR", required=True, help="checkpoint it is to hold")
    add("--url", help="root of the engine's server, http://host:port")
    version_help = "version the engine is at (default: %(default)s)"
    add("--base-version", type=int, metavar="N", default=0, help=version_help)
    encoding_help = "how positions travel (default: %(default)s)"
    add("--encoding", choices=ENCODINGS, default="deltas_zstd", help=encoding_help)
    add("--full", action="store_true", help="send all of --target, dense; needs no --base")
    bucket_help = "most bytes of a part before compression (default: %(default)s, 256 MiB)"
    add("--bucket-bytes", type=int, metavar="N", default=256 << 20, help=bucket_help)
    add("--no-digest", action="store_true", help="send no digests along")
    add("--api-key", metavar="KEY", help="bearer token (default: that in DELTA_API_KEY)")
    pause_help = "requests in flight go on with the new weights (default), finish first, or end"
    add("--pause-mode", choices=("keep", "wait", "abort"), default="keep", help=pause_help)
    add("--no-flush-cache", action="store_true", help="keep KV entries of the old weights")
    save_help = (
        "write the parts to DIR/weight_v<version>/, for the disk endpoint, and post nothing; with "
        "--url the engine is only asked which tensors it ignores and what its digest covers"
    )
    add("--save", type=Path, metavar="DIR", help=save_help)
    add("--dry-run", action="store_true", help="tell what would be sent; post and write nothing")
    options = parser.parse_args(arguments)
    if options.full:
        options.base = options.target
    elif options.base is None:
        parser.error("--base is needed, except with --full")
    if options.url is None and options.save is None and not options.dry_run:
        parser.error("--url is needed, except with --save or --dry-run")
    return options


def send_checkpoint(options: argparse.Namespace, progress: Progress) -> SyncReport:
    """Do what the command line asks."""
    with CheckpointSender(
        options.url or "",
        read_checkpoint(options.base, progress),
        base_version=options.base_version,
        encoding=options.encoding,
        bucket_bytes=options.bucket_bytes,
        digest=not options.no_digest,
        api_key=options.api_key or os.environ.get("DELTA_API_KEY"),
        pause_mode=options.pause_mode,
        flush_cache=not options.no_flush_cache,
    ) as sender:
        sender.save, sender.dry_run = options.save, options.dry_run
        send = sender.sync_full if options.full else sender.sync
        return send(read_checkpoint(options.target, progress))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments(arguments)
    console = Console(stderr=True, markup=False, soft_wrap=True)
    try:
        with Progress(console=console) as progress:
            report = send_checkpoint(options, progress)
    except SyncFailed as failed:
        console.print(f"failed: {failed}")
        return 1
    except (ValueError, KeyError, OSError, SafetensorError, httpx.InvalidURL) as error:
        console.print(f"{type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; GET /delta_status tells which version the engine is at")
        return 130
    print(
        f"version {report.base_version} -> {report.version}: {report.status}"
        f"{' (full)' if report.full else ''}; {report.nnz:,} of {report.numel:,} elements "
        f"({report.density:.3%}), {report.wire_bytes:,} of {report.full_bytes:,} bytes, "
        f"{report.parts} part(s), encode {report.encode_ms:.0f} ms, post {report.post_ms:.0f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
