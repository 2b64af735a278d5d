"""Verify a part's data and compute its identity, in one pass over the bytes.

The identity is equal for two parts only if they write the same; repeated parts are recognised by
it. The container's own checksum would not do: it covers positions and values but not which tensors
they are for, and slime's form of it ignores order. The identity leaves out what a sender can change
when it sends a part again (its sync id, its number). Differences write the same only on the same
old values, so the digest of these is included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import xxhash

from engine_ext.format.checksum import verify_checksum, xxh3_checksum
from engine_ext.format.container import Header
from engine_ext.format.manifest import DIFFERENCES

if TYPE_CHECKING:
    from typing_extensions import Buffer


def part_identity(header: Header, container: Buffer) -> str:
    """Verify the checksum of a whole, decompressed container; return the part's identity.

    It is the xxh3_128 of everything that determines what is written, as 32 hex digits. The hashed
    bytes are, as text joined with NUL: the encoding, the dtype of the values, the offsets of the
    two tensors in the data section, the ``params`` text, with differences ``digest_part``, and the
    ``xxh3_128:`` checksum of the data. That is the declared one, unless a trainer writes slime's:
    that one is weaker, so the data is hashed again.

    Raises:
        ChecksumMismatch: the data is not what the sender hashed.
        MalformedPart: the declared checksum has no known form.
    """
    manifest, start = header.manifest, header.data_begin
    data = np.frombuffer(memoryview(container), np.uint8)
    positions = data[header.positions.begin : header.positions.end]
    values = data[header.values.begin : header.values.end]
    checksum = verify_checksum(manifest.checksum, positions, values, header.values.dtype)
    hashed = (
        manifest.encoding,
        header.values.dtype,
        header.positions.begin - start,
        header.values.begin - start,
        header.metadata["params"],
        *([header.metadata["digest_part"]] if manifest.encoding == DIFFERENCES else []),
        checksum or xxh3_checksum(positions.data, values.data),
    )
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, hashed)).encode())


class RunSender(msgspec.Struct, frozen=True, kw_only=True):
    """A process that sends the weights of a run."""

    run: str
    epoch: int  # which opening of the run this is, from 1
    host: str | None = None
    pid: int | None = None


# Who brings a part: a sender, the engine's delta log, or an endpoint that makes an empty one.
Origin = Literal["sender", "log", "engine"]


class Unproven(msgspec.Struct, frozen=True, kw_only=True):
    """That nothing shows whether a version is complete: parts that arrive later might be its rest.

    Only a part that names no run is taken as the rest of the engine's version.
    """

    folder: str | None = None  # of the version, that the part is from
    file: str | None = None  # the part's name there
    apart: bool = False  # a rest only of tensors not sent before, and if parts might be missing


class PartId(msgspec.Struct, frozen=True, kw_only=True):
    """One part and the sync that it belongs to."""

    version: int  # that its sync leads to
    base_version: int | None  # that its sync starts from; None for a ``full`` sync
    identity: str  # see `part_identity`
    sync_id: str | None = None
    full: bool = False  # the sync's params are dense and together cover the model
    part: int = 0
    num_parts: int | None = None  # of the sync, or None if this part does not say
    unproven: Unproven | None = None  # None: something says that no part of the version is missing
    # What the delta log has of the versions that its sync leads over: records by folder's name.
    log_records: dict[str, str] = {}
    sender: RunSender | None = None  # None: the part names no run
    origin: Origin = "sender"

    @property
    def run(self) -> str | None:
        """The run that the part names."""
        return None if self.sender is None else self.sender.run

    @property
    def continues(self) -> bool:
        """Whether it can be one more transaction at the engine's version."""
        return continues(self.unproven, self.sender, full=self.full)


def continues(unproven: Unproven | None, sender: RunSender | None, *, full: bool) -> bool:
    """Return whether a part or a sync can be one more transaction at the engine's version.

    Nothing says that its version is whole, it names no run, and it is not a full one.
    """
    return unproven is not None and sender is None and not full
