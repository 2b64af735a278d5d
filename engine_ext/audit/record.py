"""One record of an audit file: a line of JSON with the hash of the line before it.

The signature is the HMAC-SHA256 of the line without it. A line is canonical: a record has one
encoding, so that no byte of a line can change unseen.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, Literal

import msgspec

from engine_ext.format import Origin, RunSender, sign
from engine_ext.structs import prepare

FIRST: Final = "0" * 64
"""In place of the hash of the line before, in the first line of a file."""
START: Final = b'{"kind":'
"""Every line begins with this."""

Kind = Literal["loaded", "committed", "rolled_back", "uncertain", "found"]


class AuditRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What has happened to the weights of an engine, or of one of its adapters.

    ``loaded``: the weights that it has started with. ``committed``, ``rolled_back``: a version that
    it serves from then on. ``uncertain``: a write has failed half-way; nothing is served.
    ``found``: the weights are others than the last record says, because something else has changed
    them (`changed_by`), or because the process that changed them died before it wrote the record.

    Digests are those of all weights, 32 hex digits; None where they are not known.
    """

    kind: Kind
    at: float  # Unix time
    version: int  # of the weights from then on; of a failed write, the version before
    run: str | None = None  # the version's
    digest: str | None = None  # of the weights from then on
    base_version: int | None = None  # of the weights before
    digest_before: str | None = None
    full: bool = False
    parts: int = 0
    bytes: int = 0  # of these, as they were sent
    sync_id: str | None = None
    sender: RunSender | None = None  # None: its parts name no run
    origin: Origin | None = None  # who has brought the parts
    late: bool = False  # the process that has committed it died before it wrote the record
    changed_by: str | None = None
    adapter: str | None = None  # the LoRA adapter whose weights these are; None: the model's
    engine: str = ""
    host: str = ""
    pid: int = 0  # of the HTTP process that has written the record
    boot: str = ""  # unique for each start of an engine
    previous: str = FIRST  # SHA-256 of the line before
    signature: str | None = None


prepare(AuditRecord)


def encode_line(record: AuditRecord, previous: str, key: str | None) -> bytes:
    """Return a record as a line, without its end.

    Args:
        previous: the hash of the line before; `FIRST` if there is none.
        key: signs it.
    """
    record = msgspec.structs.replace(record, previous=previous, signature=None)
    text = msgspec.json.encode(record)
    if key is None:
        return text
    return msgspec.json.encode(msgspec.structs.replace(record, signature=sign(key, text)))


def decode_line(line: bytes) -> AuditRecord | None:
    """Return the record that a line is; None if it is none, or was changed so that it is none."""
    try:
        record = msgspec.json.decode(line, type=AuditRecord)
        return record if msgspec.json.encode(record) == line else None
    except (ValueError, RecursionError):
        return None


def is_signed(record: AuditRecord, key: str) -> bool:
    """Return whether a record has the signature by this key."""
    expected = sign(key, msgspec.json.encode(msgspec.structs.replace(record, signature=None)))
    return hmac.compare_digest((record.signature or "").encode(), expected.encode())


def hash_of(line: bytes) -> str:
    """Return the hash that the next line has of this one."""
    return hashlib.sha256(line).hexdigest()
