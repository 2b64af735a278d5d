"""Complete what parts say of the sync that they are of: versions, numbers, proof of completeness.

Parts of this project's senders say all of it in their metadata. Those of other trainers have no
numbers, ids or bases: the parts of one request become one sync, and what nothing shows to be
complete says so in one field, `PartId.unproven`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from delta_server.coordinator import Coordinator
from delta_server.request_options import Options
from delta_server.staging import NumberedPart
from engine_ext.errors import MalformedPart
from engine_ext.format import Manifest, Origin, PartId, RunSender, Unproven, split_owner


def part_id(
    manifest: Manifest, identity: str, options: Options, origin: Origin = "sender"
) -> PartId:
    """Return the id of a part, from its metadata and the request's options.

    Raises:
        MalformedPart: the two disagree, or no version is given.
    """
    version = _agree("version", manifest.current_version, options.weight_version)
    if version is None:
        raise MalformedPart("no version: set current_version in the part, or weight_version")
    base = _agree("base version", manifest.base_version, options.base_version)
    if manifest.full:
        base = None
    elif base is None:
        base = version - 1
    only_part = manifest.part is None and manifest.num_parts is None
    return PartId(
        version=version,
        base_version=base,
        identity=identity,
        sync_id=manifest.sync_id,
        full=manifest.full,
        part=manifest.part or 0,
        num_parts=1 if only_part else manifest.num_parts,
        sender=_sender_of(manifest),
        origin=origin,
    )


def _sender_of(manifest: Manifest) -> RunSender | None:
    if manifest.run is None:
        return None
    owner = manifest.run_owner
    host, pid = (None, None) if owner is None else split_owner(owner)
    return RunSender(run=manifest.run, epoch=manifest.run_epoch or 1, host=host, pid=pid)


def _agree(what: str, in_part: int | None, in_request: int | None) -> int | None:
    if None not in (in_part, in_request) and in_part != in_request:
        message = f"the part's {what} is {in_part}, the request says {in_request}"
        raise MalformedPart(message, in_part=in_part, in_request=in_request)
    return in_part if in_part is not None else in_request


def is_anonymous(manifest: Manifest, options: Options) -> bool:
    """Return whether a part might be one of several that only their version connects."""
    numbers = (manifest.part, manifest.num_parts, manifest.base_version)
    digests = (manifest.digest_before, manifest.digest_after)
    given = (*numbers, manifest.sync_id, manifest.run, *digests, options.base_version)
    return not manifest.full and all(one is None for one in given)


async def as_one_sync(
    coordinator: Coordinator, parts: Sequence[NumberedPart], *, apart: bool = False
) -> list[NumberedPart]:
    """Number the parts of one request as all the parts of one sync.

    If they name the version that the engine is at, those not seen before become its continuation,
    and the others are left out.

    Args:
        apart: the part has nothing but its version to connect it with others; see
            `engine_ext.format.Unproven`.
    """
    first = parts[0][0]
    by_identity = {part.identity: (part, verified) for part, verified in parts}
    unseen = await coordinator.unseen(first.version, first.run, list(by_identity))
    fresh = [one for one in by_identity if one in unseen] or list(by_identity)[:1]
    sync_id = "files:" + xxhash.xxh3_128_hexdigest("".join(sorted(fresh)).encode())
    chosen = [by_identity[identity] for identity in fresh]
    # A full sync must cover the model, and a folder that proves states has an index.
    proven = all(one.manifest.full or one.manifest.proves_states for _, one in chosen)

    def unproven(part: PartId) -> Unproven | None:
        own = part.unproven or Unproven()
        return None if proven else msgspec.structs.replace(own, apart=apart)

    return [
        (
            msgspec.structs.replace(
                part,
                sync_id=part.sync_id or sync_id,
                part=number,
                num_parts=len(fresh),
                unproven=unproven(part),
            ),
            verified,
        )
        for number, (part, verified) in enumerate(chosen)
    ]
