"""Read and verify whole versions of a delta log, and fold several into one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from engine_ext.format import (
    DecodedPart,
    FrameReader,
    Limits,
    Manifest,
    ParamDelta,
    decode_part,
    encode_part,
    sign,
    signing_key,
)
from engine_ext.log.catalog import CannotFold, Entry, folder_name
from engine_ext.log.delta_log import DeltaLog
from engine_ext.log.folder_store import open_regular
from engine_ext.log.records import Digests, declared_digests, read_header, read_part
from engine_ext.log.spilled import SpilledDeltas
from engine_ext.log.values import ModelValues
from engine_ext.log.writer import begin
from engine_ext.version_folders import (
    INDEX,
    check_change,
    read_file,
    read_tensor,
    read_version_folder,
)

_Read = TypeVar("_Read")

_ENCODING = "deltas_zstd"  # of a folded part; it sends values
BUCKET_BYTES = 64 << 20  # of a folded part, before compression


def read_manifests(entry: Entry) -> list[Manifest]:
    """Read and verify all parts of a version, one at a time, and decode their manifests alone.

    Raises:
        LogDamaged: something is missing, or differs from what the sender wrote.
    """
    manifests = list(_read_parts(entry, _manifest))
    _check_together(entry, manifests)
    return manifests


def verify_version(entry: Entry) -> Digests:
    """Read and verify a version as far as that is possible without an engine.

    The checksums in a folder with an index are not verified: they are of tensors' new states.

    Returns:
        The digests that its parts declare.

    Raises:
        LogDamaged: something is missing, or differs from what the sender wrote.
    """
    if not entry.foreign:
        # One part is in memory.
        manifests = [part.manifest for part in _read_parts(entry, _decoded)]
        _check_together(entry, manifests)
        return declared_digests(manifests)
    limits = Limits()
    names = [path.name for path in entry.folder.iterdir()]

    def open_file(name: str) -> BinaryIO:
        return open_regular(entry.folder / name)

    with entry.reading(INDEX):
        index = read_version_folder(entry.folder.name, names, open_file, limits).index
    for file in index.files:
        with entry.reading(file), open_file(file) as source:
            for tensor in read_file(source, index, file, limits):
                raw = np.frombuffer(read_tensor(source, tensor), np.uint8)
                if index.encoding is not None:
                    check_change(tensor.name, index.encoding, raw, limits)
    return Digests(None, None)


def fold_versions(
    log: DeltaLog,
    entries: Sequence[Entry],
    base_version: int,
    *,
    checkpoint: Path | None = None,
    before: Sequence[Entry] = (),
    source: DeltaLog | None = None,
    progress: Callable[[Sequence[Entry]], Iterable[Entry]] = iter,
) -> Path:
    """Write one delta with the effect of several versions in sequence; return its entry's folder.

    If several versions write an element, the last value is kept. The result leads from
    `base_version` to the last one's version; it is full if the first is.

    Args:
        log: the log that the result is added to.
        entries: the versions, see `engine_ext.log.catalog.route`; from `base_version`.
        base_version: the version that the result starts from.
        checkpoint: the folder of the checkpoint that the log starts from. Needed if a version sends
            differences; the result has values.
        before: the versions that lead from the checkpoint to `base_version`.
        source: the log that has the versions; `log` if None.
        progress: iterates over the versions, and can display the progress.

    Raises:
        CannotFold: some version sends differences or flipped bits, and there is no checkpoint or it
            is another one; or some version is a folder with an index; or `entries` is empty.
        LogDamaged, PartUnavailable: one of the versions is damaged, or cannot be read now.
        FileExistsError: the result is already there.
        BlockingIOError: another process writes it.
        OSError: it cannot be written. The log is unchanged after any of these.
    """
    if not entries:
        raise CannotFold("there are no versions to fold")
    for entry in (*before, *entries):
        if entry.foreign:
            raise CannotFold(
                f"version {entry.version} is a folder of another trainer, with {INDEX}: its "
                "changes are of old bytes, which are not in the log"
            )
    values = None if checkpoint is None else ModelValues(checkpoint)
    earlier = [] if values is None else [*before]
    first = last = Digests(None, None)
    sender: dict[str, Any] = {}
    with SpilledDeltas() as folded:
        for number, entry in enumerate(progress([*earlier, *entries])):
            is_folded = number >= len(earlier)
            manifests = []
            with (source or log).fetched(entry):
                for part in _read_parts(entry, _decoded):  # one in memory
                    manifests.append(part.manifest)
                    deltas = _deltas(part, values)
                    if is_folded:
                        folded.add(deltas)
                _check_together(entry, manifests)
            if is_folded:
                last, sender = declared_digests(manifests), _sender_of(manifests[0])
                first = last if number == len(earlier) else first
        return _write(log, folded, entries, base_version, first.before, last.after, sender)


def _write(
    log: DeltaLog,
    folded: SpilledDeltas,
    entries: Sequence[Entry],
    base_version: int,
    digest_before: str | None,
    digest_after: str | None,
    sender: Mapping[str, Any],
) -> Path:
    target, full, sync_id = entries[-1].version, entries[0].full, uuid.uuid4().hex
    groups = list(_groups(folded))
    key = signing_key()
    draft = begin(log.store, folder_name(target, base_version))
    try:
        for number, group in enumerate(groups):
            # The old values are not known here, so a part has no digest; the digests of the model
            # prove as much once the last part is staged.
            body = encode_part(
                [folded.result(name) for name in group],
                encoding=_ENCODING,
                current_version=target,
                base_version=None if full else base_version,
                sync_id=sync_id,
                part=number,
                num_parts=len(groups),
                full=full,
                digest_before=None if full else digest_before,
                digest_after=digest_after if number == len(groups) - 1 else None,
                **sender,
            )
            draft.add(body, None if key is None else sign(key, body))
        return draft.finish(key)
    except BaseException:
        draft.drop()
        raise


def _sender_of(manifest: Manifest) -> dict[str, Any]:
    """Return what a part says about the run that its version is of."""
    names = ("run", "run_epoch", "run_owner")
    return {name: getattr(manifest, name) for name in names}


def _deltas(part: DecodedPart, values: ModelValues | None) -> list[ParamDelta]:
    """Return the deltas of a part with values; CannotFold if these are not known."""
    if values is not None:
        return values.take(part)
    for delta in part.deltas:
        if delta.needs_old:
            raise CannotFold(
                f"version {part.manifest.current_version} sends changes ({delta.name}), and "
                "the values that they change are not in the log; name the checkpoint that it "
                "starts from (--base)"
            )
    return [*part.deltas]


def _manifest(data: bytes) -> Manifest:
    return read_header([data]).manifest


def _read_parts(entry: Entry, decode: Callable[[bytes], _Read]) -> Iterator[_Read]:
    """Yield what `decode` makes of each part's bytes, as they were sent, which are verified."""
    entry.require_files()
    for path in entry.paths:
        with entry.reading(path.name):
            part = decode(read_part(entry, path))
        yield part


def _decoded(data: bytes) -> DecodedPart:
    frame = FrameReader(Limits().max_part_bytes)
    container = b"".join(frame.feed(data))
    frame.finish()
    return decode_part(container)


def _check_together(entry: Entry, manifests: Sequence[Manifest]) -> None:
    """Check that the parts belong to one sync, and to the one in ``DONE``."""
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
    if numbered and (sorted(numbered) != list(range(len(manifests))) or counts != {len(manifests)}):
        raise entry.damaged(f"it has the parts {sorted(numbered)} of {sorted(map(str, counts))}")


def _groups(folded: SpilledDeltas) -> Iterator[list[str]]:
    """Yield the tensors of each part: of one dtype and about `BUCKET_BYTES`; at least one part."""
    groups: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, dtype, size in folded.sizes():
        group = groups.setdefault(dtype, [])
        if group and sizes[dtype] + size > BUCKET_BYTES:
            yield group
            group = groups[dtype] = []
            sizes[dtype] = 0
        group.append(name)
        sizes[dtype] = sizes.get(dtype, 0) + size
    yield from groups.values() or [[]]
