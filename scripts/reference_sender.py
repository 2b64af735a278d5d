"""Reference sender: compare a trainer's weights with what the engine has, and send the changes.

It needs the core of `engine_ext` (no engine), httpx, tenacity and rich. In a trainer::

    with DeltaSender("http://engine:8000", base=checkpoint_tensors) as sender:
        for batch in data:
            train(batch)
            print(sender.sync(model.state_dict().items()).wire_bytes)

As a program it sends the difference between two Hugging Face checkpoints; see ``--help``.

The one rule: the snapshot is what the engine holds. It moves only once the engine has answered
that it committed, and by exactly the bytes sent. Whatever fails, the next sync sends all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import uuid
from collections import Counter, defaultdict
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

from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype, torch_bits_dtype
from engine_ext.wire.part import ParamDelta, encode_part
from engine_ext.wire.positions import ENCODINGS, encode_positions

if TYPE_CHECKING:
    from typing_extensions import Self

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Changes = dict[str, ParamDelta]  # by name; private copies


class SyncFailed(Exception):
    """The sync did not commit, as far as is known; snapshot and version are as before it.

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
    """One sync."""

    version: int
    base_version: int
    nnz: int  # elements sent; a dense param counts with all of its elements
    numel: int  # elements of the model
    full_bytes: int  # bytes of the model
    wire_bytes: int  # bytes of the request bodies, each counted once
    parts: int
    encode_ms: float  # everything but posting: reading tensors, comparing, encoding
    post_ms: float  # requests, with their retries and waits
    status: str  # "committed" or "already_applied"
    full: bool
    engine: dict[str, Any]  # the engine's last answer

    @property
    def density(self) -> float:
        return self.nnz / max(1, self.numel)


class DeltaSender:
    """Keeps an engine's weights in step with a trainer's. Not thread-safe.

    Tensors come as (name, tensor) in checkpoint coordinates: unsharded, and named as in the
    Hugging Face checkpoint. They are read one by one, so a generator that gathers each when asked
    will do. CUDA tensors are brought to the CPU whole and compared there: simple, not fastest.
    Of tied tensors (one storage, several names) only the first name is kept and sent; if they ever
    differ, that is a ValueError. So do not yield views of a buffer that is refilled in between.

    Host memory: the snapshot (the model's size), the changes until they are committed (8 bytes
    plus the itemsize for each element), and about two parts.

    Args:
        url: The engine's root, ``http://host:port``.
        base: What the engine holds now; copied.
        base_version: The version the engine is at.
        encoding: One of `ENCODINGS`.
        bucket_bytes: Most bytes of positions and values in one part, before compression. A param
            is never split: a larger one travels alone.
        dense_above: Density above which a param is sent dense; None: where that takes no more.
        api_key: Bearer token.
        pause_mode, flush_cache: As the endpoint takes them.
        timeout: Seconds, for one request and for waiting until another sync is out of the way.
        client: Used in place of an own one, and not closed.

    Attributes:
        version: The version that the engine acknowledged last.
        committing: Whether a last part was handed over and not yet answered. An exception that
            leaves it True (Ctrl-C, say) leaves open whether the engine has committed.
    """

    def __init__(
        self,
        url: str,
        base: NamedTensors,
        *,
        base_version: int = 0,
        encoding: str = "deltas_zstd",
        bucket_bytes: int = 256 << 20,
        dense_above: float | None = None,
        api_key: str | None = None,
        pause_mode: str = "keep",
        flush_cache: bool = True,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
    ) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding {encoding!r} is not one of {', '.join(ENCODINGS)}")
        self.version, self.committing = base_version, False
        self._encoding, self._bucket_bytes = encoding, bucket_bytes
        self._dense_above, self._timeout = dense_above, timeout
        self._url = url.rstrip("/") + "/update_weights_delta"
        self._query = {"pause_mode": pause_mode, "flush_cache": "true" if flush_cache else "false"}
        self._headers = {"Content-Type": "application/octet-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._owns_client = client is None
        self._client = client or httpx.Client(timeout=timeout)
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

        If the engine turns out to hold something else (it was restarted, or committed a sync whose
        answer was lost) or to be ``uncertain``, the whole model is sent instead, once.

        Raises:
            SyncFailed: The engine refused, or could not be reached.
            ValueError: Names, shapes or dtypes are not the base's. Parts may be staged already;
                the engine drops them after its stage timeout.
        """
        changes: Changes = {}
        deltas = self._read(tensors, changes)
        try:
            return self._send(deltas, changes, self.version + 1, full=False)
        except SyncFailed as failed:
            if not _calls_for_full(failed):
                raise
            actual = failed.error.get("actual")
        version = max(self.version, actual if isinstance(actual, int) else 0) + 1
        return self._send(self._whole_model(deltas, changes), changes, version, full=True)

    def sync_full(self, tensors: NamedTensors) -> SyncReport:
        """Send every tensor dense, whatever the engine holds. Raises as `sync`."""
        changes: Changes = {}
        model = self._whole_model(self._read(tensors, changes), changes)
        return self._send(model, changes, self.version + 1, full=True)

    def _read(self, tensors: NamedTensors, changes: Changes) -> Iterator[ParamDelta]:
        """Yield each changed param, having put it into `changes`."""
        seen: set[str] = set()
        for name, tensor, first in _with_ties(tensors):
            kept = name if name in self._snapshot else self._tied.get(name, first or name)
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
                changes[kept] = self._gather(new, indices)
                yield changes[kept]
        if missing := self._snapshot.keys() - seen:
            raise ValueError(f"missing, but in the base: {', '.join(sorted(missing))}")

    def _gather(self, new: ParamDelta, indices: np.ndarray[Any, np.dtype[np.int64]]) -> ParamDelta:
        """Copy the values at `indices` (int64 [nnz]) of a dense param, or all if that is better."""
        sparse = replace(new, indices=indices, values=new.values[indices])
        if self._dense_above is None:
            dense = self._payload_bytes(sparse) >= new.values.nbytes
        else:
            dense = indices.size > self._dense_above * new.numel
        return replace(new, values=new.values.copy()) if dense else sparse

    def _payload_bytes(self, delta: ParamDelta) -> int:
        """Bytes of a param's positions and values, before compression."""
        if delta.indices is None:
            return delta.values.nbytes
        return encode_positions(self._encoding, delta.indices)[0].nbytes + delta.values.nbytes

    def _image(self, name: str, changes: Changes) -> ParamDelta:
        """The snapshot's tensor with `changes` made, dense; to read only, it may be no copy."""
        kept, change = self._snapshot[name], changes.get(name)
        if change is None or change.indices is None:
            return change or kept
        values = kept.values.copy()
        values[change.indices] = change.values
        return replace(kept, values=values)

    def _whole_model(self, unread: Iterable[ParamDelta], changes: Changes) -> Iterator[ParamDelta]:
        """Read to the end, then yield every tensor as it was read, dense."""
        for _ in unread:
            pass
        for name in self._snapshot:
            yield self._image(name, changes)

    def _buckets(self, deltas: Iterable[ParamDelta]) -> Iterator[list[ParamDelta]]:
        """Group params into parts of one dtype and at most `bucket_bytes`, or one param."""
        buckets: defaultdict[str, list[ParamDelta]] = defaultdict(list)
        filled: Counter[str] = Counter()
        for delta in deltas:
            size = self._payload_bytes(delta)
            if buckets[delta.dtype] and filled[delta.dtype] + size > self._bucket_bytes:
                yield buckets.pop(delta.dtype)
                filled[delta.dtype] = 0
            buckets[delta.dtype].append(delta)
            filled[delta.dtype] += size
        yield from buckets.values()

    def _send(
        self, deltas: Iterable[ParamDelta], changes: Changes, version: int, *, full: bool
    ) -> SyncReport:
        """Encode and post part by part; once committed, move the snapshot by `changes`."""
        sync_id, base_version = uuid.uuid4().hex, self.version
        start, post_s, nnz, wire_bytes, parts = time.perf_counter(), 0.0, 0, 0, 0
        answer: dict[str, Any] = {}
        self.committing = False
        for bucket, last in _mark_last(self._buckets(deltas)):
            body = encode_part(
                bucket,
                encoding=self._encoding,
                current_version=version,
                base_version=None if full else base_version,
                sync_id=sync_id,
                part=parts,
                num_parts=parts + 1 if last else None,
                full=full,
            )
            post_start = time.perf_counter()
            self.committing = last
            answer = self._deliver(body, version, parts, last)
            post_s += time.perf_counter() - post_start
            nnz += sum(delta.nnz for delta in bucket)
            wire_bytes += len(body)
            parts += 1
        self._advance(changes)
        self.version = version  # after the snapshot: if that is interrupted, a full sync follows
        self.committing = False
        return SyncReport(
            version=version,
            base_version=base_version,
            nnz=nnz,
            numel=sum(kept.numel for kept in self._snapshot.values()),
            full_bytes=sum(kept.values.nbytes for kept in self._snapshot.values()),
            wire_bytes=wire_bytes,
            parts=parts,
            encode_ms=(time.perf_counter() - start - post_s) * 1e3,
            post_ms=post_s * 1e3,
            status=answer["status"],
            full=full,
            engine=answer,
        )

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        """A private copy, for the snapshot."""
        return replace(dense, values=dense.values.copy())

    def _advance(self, changes: Changes) -> None:
        """Make the committed `changes` in the snapshot."""
        for name, change in changes.items():
            where = slice(None) if change.indices is None else change.indices
            self._snapshot[name].values[where] = change.values

    def _deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Post one part until it is taken or refused; returns the engine's answer."""
        when_free = retry(
            retry=retry_if_exception_type(_Busy),
            wait=_retry_after,
            stop=stop_before_delay(self._timeout),
            reraise=True,
        )
        answer = when_free(self._post)(body)
        expected = ("committed", "already_applied") if last else ("staged",)
        if answer.get("status") not in expected or (last and answer.get("version") != version):
            raise SyncFailed(f"part {part} of version {version} was answered {answer}", 200)
        return answer

    @retry(
        retry=retry_if_exception_type(_Unreachable),
        wait=wait_random_exponential(multiplier=0.5, max=4.0),
        stop=stop_after_attempt(8),
        reraise=True,
    )
    def _post(self, body: bytes) -> dict[str, Any]:
        try:
            response = self._client.post(
                self._url, params=self._query, headers=self._headers, content=body
            )
        except httpx.TransportError as error:
            raise _Unreachable(f"{self._url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _refusal(response)
        return _json_object(response)


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


def _mark_last(buckets: Iterator[list[ParamDelta]]) -> Iterator[tuple[list[ParamDelta], bool]]:
    """Yield each bucket and whether it is the last; an empty one if there is none."""
    bucket = next(buckets, [])
    for following in buckets:
        yield bucket, False
        bucket = following
    yield bucket, True


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
    add("--api-key", metavar="KEY", help="bearer token (default: that in DELTA_API_KEY)")
    pause_help = "requests in flight go on with the new weights (default), finish first, or end"
    add("--pause-mode", choices=("keep", "wait", "abort"), default="keep", help=pause_help)
    add("--no-flush-cache", action="store_true", help="keep KV entries of the old weights")
    save_help = "write the parts to DIR/weight_v<version>/, for the disk endpoint; post nothing"
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
        api_key=options.api_key or os.environ.get("DELTA_API_KEY"),
        pause_mode=options.pause_mode,
        flush_cache=not options.no_flush_cache,
    ) as sender:
        sender.save, sender.dry_run = options.save, options.dry_run
        send = sender.sync_full if options.full else sender.sync
        try:
            return send(read_checkpoint(options.target, progress))
        except KeyboardInterrupt:
            sent = "the last part was sent: the engine may have committed, see GET /delta_status"
            outcome = sent if sender.committing else "the engine is unchanged"
            raise KeyboardInterrupt(outcome) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments(arguments)
    console = Console(stderr=True, markup=False, soft_wrap=True)
    try:
        with Progress(console=console) as progress:
            report = send_checkpoint(options, progress)
    except SyncFailed as failed:
        console.print(f"not committed: {failed}")
        return 1
    except (ValueError, KeyError, OSError, SafetensorError, httpx.InvalidURL) as error:
        console.print(f"{type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        console.print(f"interrupted: {str(interrupt) or 'the engine is unchanged'}")
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
