"""Pushed versions: a part that is sent, and the step that has changed nothing."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any

from delta_server.intake import VerifiedPart
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.sources import Inlet, Source, deliver
from delta_server.sources.numbering import as_one_sync, is_anonymous, part_id
from delta_server.staging import NumberedPart
from engine_ext.errors import EngineUncertain, VersionConflict
from engine_ext.format import Verifier, encode_part, optional_version, signing_key


class SinglePart(Source):
    """A source of one part. One without numbers, ids and base might be the rest of a version.

    Args:
        arriving: takes the part in; see `received`.
    """

    def __init__(
        self,
        inlet: Inlet,
        arriving: Awaitable[VerifiedPart],
        options: Options,
        record: RequestRecord,
    ) -> None:
        super().__init__(inlet, options, record)
        self._arriving = arriving

    async def parts(self) -> AsyncGenerator[VerifiedPart, None]:
        """Yield the part."""
        yield await self._arriving

    async def complete(self, verified: Sequence[VerifiedPart]) -> list[NumberedPart]:
        """Return the part with its id.

        Raises:
            MalformedPart: its metadata and the request's options disagree, or none has a version.
        """
        [one] = verified
        part = part_id(one.manifest, one.identity, self.options, self.record.origin)
        if is_anonymous(one.manifest, self.options):
            return await as_one_sync(self.inlet.coordinator, [(part, one)], apart=True)
        return [(part, one)]


async def received(
    inlet: Inlet,
    chunks: AsyncIterator[bytes],
    size: int | None,
    signature: str | None,
    record: RequestRecord,
) -> VerifiedPart:
    """Take in a part that is sent to this process.

    Args:
        size: that the sender declares; None if it does not.
        signature: that it gives; checked if a key is set.

    Raises:
        DeltaError: see `Intake.receive`; nothing of the part is kept.
    """
    key = signing_key()
    verifier = None if key is None else Verifier(key, signature)
    record.expected = size
    verified = await inlet.intake.receive(
        record.count_received(chunks), size, inlet.minimum_rate, verifier
    )
    record.timings["receive_ms"] = record.seconds * 1e3
    return verified


async def advance(
    inlet: Inlet,
    text: str,
    options: Options,
    record: RequestRecord,
    *,
    ends_requests: bool = False,
) -> dict[str, Any]:
    """Take a later version that holds the same weights; return the answer as JSON.

    It is of the owner's run if the version before is; else of a run without a name. If something
    else has changed the weights, so that they are of no version known here, only the engine's own
    weight version is set: delta sync has no say then.

    Args:
        ends_requests: whether those in flight are ended also where nothing is committed; a commit
            does what the options' pause mode says.

    Raises:
        BaseMismatch: weights were found to hold other bits than the syncs have written.
        MalformedPart: `text` is no decimal.
        VersionConflict: the version is an earlier one.
        DeltaError: see `deliver`. The engine is unchanged.
    """
    held = await inlet.coordinator.held()
    current = held.version
    if held.uncertain:
        raise EngineUncertain("an earlier write failed half-way; send a full sync")
    if held.changed_by is not None:
        if ends_requests:
            await inlet.coordinator.end_requests()
        await inlet.coordinator.set_weight_version(text)
        facts = {"version": current, "run": held.run, "nnz": 0, "tensors": 0}
        return record.answer("committed", facts)
    held.require_intact()
    version = optional_version({"new_version": text}, "new_version")
    assert version is not None
    if version < current:
        raise VersionConflict(
            f"the engine is at version {current}; a rollback or a full sync leads to {version}",
            expected=version,
            actual=current,
        )
    if version == current:
        if ends_requests:
            await inlet.coordinator.end_requests()
        published = await inlet.coordinator.publish()
        return record.answer("already_applied", {"version": version, **published})
    record.origin = "engine"
    body = encode_part(
        [],
        encoding="indices",
        current_version=version,
        base_version=current,
        sync_id=f"version:{version}",
    )
    made = asyncio.to_thread(inlet.intake.read, io.BytesIO(body))
    return await deliver(SinglePart(inlet, made, options, record))
