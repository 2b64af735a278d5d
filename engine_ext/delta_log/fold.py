"""Whole versions of a delta log: read and verified, and several folded into one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from engine_ext.delta_log.catalog import Entry, folder_name
from engine_ext.delta_log.writer import Draft
from engine_ext.errors import ChecksumMismatch, DeltaError
from engine_ext.wire import FrameReader, Limits, ParamDelta, Part, decode_part, encode_part
from engine_ext.wire.positions import position_bytes
from engine_ext.wire.signature import SIGNATURE_SUFFIX, Verifier, sign, signing_key

BUCKET_BYTES = 256 << 20


class CannotFold(Exception):
    """These versions cannot be folded into one; the message says why."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Of the model at a version's base and at the version; None where no part has them."""

    before: str | None
    after: str | None


def read_version(entry: Entry) -> list[Part]:
    """Read, verify and decode all parts of a version, as a receiver would.

    With a key in ``DELTA_HMAC_KEY`` signatures are checked too.

    Raises:
        LogDamaged: something is missing, or is not what its sender wrote.
    """
    entry.require_files()
    parts = []
    for path in entry.paths:
        try:
            parts.append(_read_part(entry, path))
        except OSError as error:
            raise entry.damaged(f"{path.name}: {error.strerror}", file=path.name) from error
        except DeltaError as error:
            raise entry.damaged(f"{path.name}: {error.message}", file=path.name) from error
    _check_together(entry, parts)
    return parts


def digests_of(parts: Iterable[Part]) -> Digests:
    """What the parts of one version say of the whole model."""
    manifests = [part.manifest for part in parts]
    before = {m.digest_before for m in manifests} - {None}
    after = {m.digest_after for m in manifests} - {None}
    return Digests(before.pop() if before else None, after.pop() if after else None)


def fold(
    log: Path,
    way: Sequence[Entry],
    base_version: int,
    *,
    encoding: str = "deltas_zstd",
    follow: Callable[[Sequence[Entry]], Iterable[Entry]] = iter,
) -> Path:
    """Write one delta that does what several versions do, one after another.

    Of an element that several of them write, the last value counts. The result leads from
    `base_version` to the last one's version; it is full if the first is.

    Args:
        log: where it is written, beside the others.
        way: as of `engine_ext.delta_log.catalog.route`, from `base_version`.
        base_version: where it begins.
        encoding: of the result; one that sends values.
        follow: iterates over the versions, and may show how far it is.

    Returns:
        Its folder.

    Raises:
        CannotFold: some versions send differences, whose old values are not in the log; or the
            way is empty.
        LogDamaged: one of them is damaged.
        FileExistsError: it is there.
        OSError: there is no room.
    """
    if not way:
        raise CannotFold("there are no versions to fold")
    merged: dict[str, ParamDelta] = {}
    first = last = Digests(None, None)
    for entry in follow(way):
        parts = read_version(entry)
        last = digests_of(parts)
        if entry is way[0]:
            first = last
        for delta in (delta for part in parts for delta in part.deltas):
            if delta.differences:
                raise CannotFold(
                    f"version {entry.version} sends differences ({delta.name}), and what they are "
                    "added to is not in the log"
                )
            merged[delta.name] = _over(merged.get(delta.name), delta)
    target = way[-1].version
    full, sync_id = way[0].full, uuid.uuid4().hex
    groups = list(_groups(merged.values(), encoding))
    draft = Draft(log, folder_name(target, base_version))
    try:
        for number, group in enumerate(groups):
            # Nobody knows the old values here, so there is no digest of a part; those of the model
            # prove as much once the last part is there.
            body = encode_part(
                group,
                encoding=encoding,
                current_version=target,
                base_version=None if full else base_version,
                sync_id=sync_id,
                part=number,
                num_parts=len(groups),
                full=full,
                digest_before=None if full else first.before,
                digest_after=last.after if number == len(groups) - 1 else None,
            )
            key = signing_key()
            draft.add(body, None if key is None else sign(key, body))
        return draft.finish()
    except BaseException:
        draft.drop()
        raise


def _read_part(entry: Entry, path: Path) -> Part:
    data = path.read_bytes()
    key = signing_key()
    if key is not None:
        beside = path.with_name(path.name + SIGNATURE_SUFFIX)
        verifier = Verifier(key, beside.read_text() if beside.exists() else None)
        verifier.feed(data)
        verifier.finish()
    facts = entry.files[path.name]
    if facts is not None and xxhash.xxh3_128_hexdigest(data) != facts.xxh3_128:
        raise ChecksumMismatch("its bytes are not those that were written")
    frame = FrameReader(Limits().max_part_bytes)
    container = b"".join(frame.feed(data))
    frame.finish()
    return decode_part(container)


def _check_together(entry: Entry, parts: Sequence[Part]) -> None:
    """Check that the parts are all of one sync, and the one that the entry says."""
    manifests = [part.manifest for part in parts]
    for manifest in manifests:
        version = manifest.current_version
        base = None if manifest.full else manifest.base_version
        expected = None if entry.full else entry.base_version
        if version not in (None, entry.version) or base not in (None, expected):
            raise entry.damaged(f"a part leads from {base} to {version}")
        if manifest.full != entry.full and any(entry.files.values()):
            raise entry.damaged("its parts disagree about whether they are full")
    if len({manifest.sync_id for manifest in manifests}) > 1:
        raise entry.damaged("its parts are of several syncs")
    numbers = [manifest.part for manifest in manifests]
    counts = {manifest.num_parts for manifest in manifests} - {None}
    numbered = [number for number in numbers if number is not None]
    if numbered and (sorted(numbered) != list(range(len(parts))) or counts != {len(parts)}):
        raise entry.damaged(f"it has the parts {sorted(numbered)} of {sorted(map(str, counts))}")


def _over(old: ParamDelta | None, new: ParamDelta) -> ParamDelta:
    """What two deltas of one tensor do, one after the other."""
    if old is None or new.indices is None:
        return replace(new, values=new.values.copy())
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise CannotFold(f"{new.name}: {old.dtype} {old.shape}, later {new.dtype} {new.shape}")
    if old.indices is None:
        values = old.values.copy()
        values[new.indices] = new.values
        return replace(old, values=values)
    kept = ~np.isin(old.indices, new.indices, assume_unique=True)
    indices = np.concatenate([old.indices[kept], new.indices])
    values = np.concatenate([old.values[kept], new.values])
    order = np.argsort(indices, kind="stable")
    return replace(new, indices=indices[order], values=values[order])


def _groups(deltas: Iterable[ParamDelta], encoding: str) -> Iterator[list[ParamDelta]]:
    """Deltas of one dtype for each part, of about `BUCKET_BYTES`; at least one part."""
    groups: dict[str, list[ParamDelta]] = {}
    sizes: dict[str, int] = {}
    found = False
    for delta in deltas:
        size = delta.values.nbytes
        size += 0 if delta.indices is None else position_bytes(encoding, delta.indices)
        group = groups.setdefault(delta.dtype, [])
        if group and sizes[delta.dtype] + size > BUCKET_BYTES:
            yield group
            group = groups[delta.dtype] = []
            sizes[delta.dtype] = 0
        group.append(delta)
        sizes[delta.dtype] = sizes.get(delta.dtype, 0) + size
        found = True
    yield from groups.values() if found else [[]]
