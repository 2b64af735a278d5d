"""Empty syncs: a later version that holds the same weights."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.scrubbing import mismatched
from engine_ext.errors import BaseMismatch, EngineUncertain, VersionConflict
from engine_ext.format import encode_part, optional_version

if TYPE_CHECKING:
    from delta_server.service import DeltaService


async def advance(
    service: DeltaService, text: str, options: Options, record: RequestRecord
) -> dict[str, Any]:
    """Take a later version that holds the same weights; return the answer as JSON.

    It is of the owner's run if the version before is; else of a run without a name. If something
    else has changed the weights, so that they are of no version known here, only the engine's own
    weight version is set: delta sync has no say then.

    Raises:
        BaseMismatch: weights were found to hold other bits than the syncs have written.
        MalformedPart: `text` is no decimal.
        VersionConflict: the version is an earlier one.
        DeltaError: see `DeltaService.apply_body`. The engine is unchanged.
    """
    replies = await service.committer.status(service.engine)
    current, run = replies[0].version, replies[0].run
    if service.committer.uncertain:
        raise EngineUncertain("an earlier write failed half-way; send a full sync")
    if any(reply.foreign for reply in replies):
        await service.engine.set_weight_version(text)
        facts = {"version": current, "run": run, "nnz": 0, "tensors": 0}
        return record.answer("committed", facts)
    if wrong := mismatched(replies):
        raise BaseMismatch.in_memory(wrong)
    version = optional_version({"new_version": text}, "new_version")
    assert version is not None
    if version < current:
        raise VersionConflict(
            f"the engine is at version {current}; a rollback or a full sync leads to {version}",
            expected=version,
            actual=current,
        )
    if version == current:
        held = await service.committer.publish(service.engine)
        return record.answer("already_applied", {"version": version, **held})
    record.origin = "engine"
    body = encode_part(
        [],
        encoding="indices",
        current_version=version,
        base_version=current,
        sync_id=f"version:{version}",
    )
    verified = await asyncio.to_thread(service.intake.read, io.BytesIO(body))
    return await service.apply_body(verified, options, record)
