"""Sign what a version's ``DONE`` says, and keep it when the version is pruned.

::

    LOG/audit/v000001-v000040-3f9c….jsonl    the ``DONE`` of versions that were pruned, one per line

The signature is the HMAC-SHA256 of the content of ``DONE`` without it: versions, the parts' hashes,
run, sender, digests and time. So it binds all of them, and the parts by their hashes.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Iterable
from typing import Final

import msgspec

from engine_ext.errors import LogDamaged
from engine_ext.log.catalog import Done, Entry, FileFacts
from engine_ext.log.store import Store

FOLDER: Final = "audit"
_SUFFIX: Final = ".jsonl"
_MOST_BYTES: Final = 1 << 30


def signed(done: Done, key: str | None) -> Done:
    """Return the content of a ``DONE`` with its signature; as it is without a key."""
    if key is None or done.publication is None:
        return done
    from engine_ext.format import sign  # imports torch, which pruning does without

    return _with_signature(done, sign(key, _unsigned(done)))


def is_signed(done: Done, key: str) -> bool:
    """Return whether the content of a ``DONE`` has the signature by this key."""
    from engine_ext.format import sign

    said = done.publication
    if said is None or said.signature is None:
        return False
    return hmac.compare_digest(said.signature.encode(), sign(key, _unsigned(done)).encode())


def done_of(entry: Entry) -> Done | None:
    """Return what the ``DONE`` of a version says; None if it does not say who has written it."""
    files = {name: facts for name, facts in entry.files.items() if isinstance(facts, FileFacts)}
    if entry.publication is None or len(files) < len(entry.files):
        return None
    return Done(
        version=entry.version,
        base_version=entry.base_version,
        files=files,
        publication=entry.publication,
    )


def keep_publications(store: Store, entries: Iterable[Entry]) -> None:
    """Write what is said about versions that are about to be pruned into the log.

    Folded ones are left out: they add nothing to what is said about those that they lead over.

    Raises:
        OSError: it cannot be written.
    """
    plain = [entry for entry in entries if not entry.is_fold]
    kept = [done for entry in plain if (done := done_of(entry)) is not None]
    if not kept:
        return
    first, last = min(one.version for one in kept), max(one.version for one in kept)
    name = f"{FOLDER}/v{first:06d}-v{last:06d}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
    store.put(name, b"".join(msgspec.json.encode(one) + b"\n" for one in kept), durable=True)


def read_publications(store: Store) -> list[Done]:
    """Return what is said about the versions that were pruned.

    Raises:
        LogDamaged: a file of them cannot be read.
        OSError: the log cannot be read.
    """
    files = store.list(FOLDER).get(FOLDER)
    found: list[Done] = []
    for name in sorted([] if files is None else files.names):
        if not name.endswith(_SUFFIX):
            continue
        try:
            for line in store.read(f"{FOLDER}/{name}", _MOST_BYTES).splitlines():
                found.append(_parse(line))
        except (ValueError, RecursionError, LogDamaged) as error:
            raise LogDamaged(f"{FOLDER}/{name} cannot be read: {error}") from error
    return found


def _parse(line: bytes) -> Done:
    done = msgspec.json.decode(line, type=Done)
    if done.publication is None:
        raise LogDamaged(f"version {done.version} has no publication")
    if done.base_version is not None and done.base_version >= done.version:
        raise LogDamaged(f"a version leads from {done.base_version} to {done.version}")
    return done


def _unsigned(done: Done) -> bytes:
    return msgspec.json.encode(_with_signature(done, None))


def _with_signature(done: Done, signature: str | None) -> Done:
    assert done.publication is not None
    said = msgspec.structs.replace(done.publication, signature=signature)
    return msgspec.structs.replace(done, publication=said)
