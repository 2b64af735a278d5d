"""The identity of a part: equal for two parts only if they write the same elements.

The container's own checksum covers positions and values, not which tensors they are for, and
slime's form of it is an XOR that does not see order. Repeats are recognised by this hash instead.
What a sender may change when it sends a part again (its sync id, its number) stays out of it.
Differences are those elements only together with the old values, so their digest is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from engine_ext.wire.container import Header
from engine_ext.wire.manifest import DIFFERENCES

if TYPE_CHECKING:
    from typing_extensions import Buffer


def part_identity(header: Header, container: Buffer) -> str:
    """xxh3_128 over all that says what is written, as 32 hex digits.

    That is the encoding, the ``params`` text, the dtype and place of the two tensors, and the
    data section; with differences ``digest_part`` too.

    Args:
        header: the parsed header of `container`.
        container: the whole decompressed container.
    """
    start = min(header.positions.begin, header.values.begin)
    meaning = (
        header.manifest.encoding,
        header.values.dtype,
        header.positions.begin - start,
        header.values.begin - start,
        header.metadata["params"],
        *([header.metadata["digest_part"]] if header.manifest.encoding == DIFFERENCES else []),
    )
    digest = xxhash.xxh3_128("\0".join(map(str, meaning)).encode())
    with memoryview(container) as view:
        digest.update(view[start:])
    return digest.hexdigest()


class PartId(msgspec.Struct, frozen=True, kw_only=True):
    """What one part says it is.

    Attributes:
        version: the version its sync leads to.
        base_version: the version its sync starts from; None for a ``full`` sync.
        identity: hash of the part's params, positions and values; two parts with the same
            identity are the same part.
        sync_id: one string for all parts of a sync, or None.
        full: all params are dense and together cover the model.
        part: 0-based number of this part.
        num_parts: how many there are, or None where this part does not say.
        continues: the part may be one more transaction at the version the engine is at.
    """

    version: int
    base_version: int | None
    identity: str
    sync_id: str | None = None
    full: bool = False
    part: int = 0
    num_parts: int | None = None
    continues: bool = False
