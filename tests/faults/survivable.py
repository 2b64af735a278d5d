"""Faults that an engine must survive, one row each."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from tests.faults.harness import STAGE_TIMEOUT, Harness
from tests.faults.observed import RANKS, fill
from tests.support.plain_trainer import container, edited

Ends: TypeAlias = Literal["old", "new", "either", "uncertain"]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        what: text in the table; rows with the same text are merged.
        answer: the reply to the sender, as text in the table.
        ends: the engine's version afterwards: ``old``, ``new``, ``either`` of them, or
            ``uncertain``.
        do: causes the fault during the sync of the current step, and checks the answers.
    """

    name: str
    what: str
    answer: str
    ends: Ends
    do: Callable[[Harness], None]


def killed_in_a_body(harness: Harness) -> None:
    request = harness.raw(harness.parts()[0])
    harness.killed_sender(request[: len(request) // 2], reads=False, when=lambda: True)


def killed_between_parts(harness: Harness) -> None:
    first, _ = harness.parts(2)
    harness.killed_sender(harness.raw(first), reads=True, when=lambda: staged(harness) == [0])


def killed_after_the_commit(harness: Harness) -> None:
    after = harness.trainer.version
    [body] = harness.parts()
    harness.killed_sender(harness.raw(body), reads=False, when=lambda: harness.version() == after)
    # A sender that sends the same part again learns that it is applied.
    harness.expect(body, "already_applied")


def spool_full(harness: Harness) -> None:
    full_for(harness, harness.parts()[0])


def spool_full_at_the_second(harness: Harness) -> None:
    first, second = harness.parts(2)
    harness.expect(first, "staged")
    full_for(harness, second)


def full_for(harness: Harness, body: bytes) -> None:
    filler = fill(harness.spool())
    try:
        harness.expect(body, "507 SpoolFull")
    finally:
        filler.unlink()


def corrupted_data(harness: Harness) -> None:
    [body] = harness.parts()
    for at in (len(body) - 1, len(body) - 100):
        harness.expect(flipped(body, at), "400 ChecksumMismatch")


def corrupted_header(harness: Harness) -> None:
    """All over it, as the sender hashes the metadata too; only its key is not in its own hash."""
    [body] = harness.parts(manifest_checksum=True)
    key = body.index(b"manifest_checksum")
    for at in range(0, 8 + int.from_bytes(body[:8], "little"), 97):
        if not key <= at < key + len("manifest_checksum"):
            assert harness.outcome_of(harness.post(flipped(body, at)))[:3] in ("400", "413")


def truncated(harness: Harness) -> None:
    [body] = harness.parts()
    for length in (0, 7, 100, len(body) // 2, len(body) - 1):
        harness.expect(body[:length], "400 MalformedPart")


def corrupted_second(harness: Harness) -> None:
    first, second = harness.parts(2)
    harness.expect(first, "staged")
    harness.expect(flipped(second, len(second) - 1), "400 ChecksumMismatch")


def reordered(harness: Harness) -> None:
    parts = harness.parts(3)
    harness.expect(parts[2], "staged")
    harness.expect(parts[0], "staged")
    harness.expect(parts[1], "committed")


def duplicated(harness: Harness) -> None:
    first, second = harness.parts(2)
    harness.expect(first, "staged")
    harness.expect(first, "staged")
    harness.expect(second, "committed")
    harness.expect(second, "already_applied")
    harness.expect(first, "already_applied")


def duplicated_at_once(harness: Harness) -> None:
    [body] = harness.parts()
    with ThreadPoolExecutor(4) as pool:
        outcomes = sorted(map(harness.outcome_of, pool.map(harness.post, [body] * 4)))
    assert outcomes == [*["already_applied"] * 3, "committed"]


def missing(harness: Harness) -> None:
    parts = harness.parts(3)
    harness.expect(parts[0], "staged")
    harness.expect(parts[2], "staged")


def other_bytes(harness: Harness) -> None:
    first, second = harness.parts(2, sync_id="one")
    harness.expect(first, "staged")
    harness.expect(edited(second, part="0"), "409 Conflict")


def stale(harness: Harness) -> None:
    [body] = harness.parts()
    old = str(harness.base_version)
    # Another's way to the version that the engine is at, and one from further back.
    before = str(harness.base_version - 1)
    harness.expect(edited(body, current_version=old, base_version=before), "409 VersionConflict")
    harness.expect(edited(body, base_version=before), "409 VersionConflict")


def future(harness: Harness) -> None:
    [body] = harness.parts()
    there, next_one = str(harness.trainer.version), str(harness.trainer.version + 1)
    answer = harness.expect(
        edited(body, current_version=next_one, base_version=there), "409 VersionConflict"
    )
    assert answer.json()["error"]["actual"] == harness.base_version


def two_senders(harness: Harness) -> None:
    """Both have whole syncs to a version, of other weights; one of them wins."""
    syncs = []
    who: Any
    for encoding, who in (("deltas", {}), ("indices", of_another(harness))):
        syncs.append((dict(harness.trainer.tensors), harness.parts(encoding=encoding, **who)))
        harness.other_values()
    with ThreadPoolExecutor(2) as pool:
        outcomes = [
            harness.outcome_of(answer) for answer in pool.map(harness.post, [b for _, [b] in syncs])
        ]
    won = outcomes.index("committed")
    assert outcomes[1 - won] in ("409 VersionConflict", "409 SyncInProgress", "409 RunConflict")
    harness.trainer.tensors, harness.sent = syncs[won]


def two_senders_between_parts(harness: Harness) -> None:
    tensors = dict(harness.trainer.tensors)
    first, second = sent = harness.parts(2)
    harness.other_values()
    [other] = harness.parts(**of_another(harness))
    harness.expect(first, "staged")
    if harness.run:
        harness.expect(other, "409 RunConflict")
    else:
        answer = harness.expect(other, "409 SyncInProgress")
        assert 1 <= int(answer.headers["Retry-After"]) <= STAGE_TIMEOUT
    harness.expect(second, "committed")
    harness.trainer.tensors, harness.sent = tensors, sent


def of_another(harness: Harness) -> dict[str, Any]:
    """Metadata of another sender's parts: with a run, if the engine's sender has one."""
    return {"run": uuid.uuid4().hex, "run_epoch": "1"} if harness.run else {}


def another_run(harness: Harness) -> None:
    """Nobody but the owner gets in, with a delta or with all weights."""
    owned = bool(harness.run)
    if not owned:
        harness.ask("claim", "the-owner")
    other: Any = {"run": uuid.uuid4().hex, "run_epoch": "1"}
    [body] = harness.parts(**other)
    tensors = harness.trainer.tensors
    whole = {"current_version": "99999", "full": "true", **other}
    harness.expect(body, "409 RunConflict")
    harness.expect(container(tensors, dict.fromkeys(tensors), metadata=whole), "409 RunConflict")
    if not owned:
        harness.ask("release", "the-owner")


def takeover(harness: Harness) -> None:
    """The sender gets the engine from another run, which has staged parts."""
    owned = bool(harness.run)
    run: Any = harness.run or {"run": uuid.uuid4().hex, "run_epoch": "1"}
    first, second = harness.parts(2, **run)
    if owned:
        harness.ask("release", **run)
    other = {"run": uuid.uuid4().hex, "run_epoch": "1"}
    harness.ask("claim", **other)
    late = edited(first, **other)
    harness.expect(late, "staged")
    harness.ask("claim", takeover=True, **run)
    harness.expect(late, "409 RunFenced")
    harness.expect(first, "staged")
    harness.expect(second, "committed")
    harness.expect(late, "409 RunFenced")
    if not owned:  # nor is it when the parts are sent again
        harness.ask("release", **run)
        harness.sent = [edited(body, run=None, run_epoch=None) for body in harness.sent]


def asleep(harness: Harness) -> None:
    [body] = harness.parts()
    harness.sleep()
    harness.expect(body, "409 WeightsAsleep")
    harness.wake()


def asleep_between_parts(harness: Harness) -> None:
    first, second = harness.parts(2)
    harness.expect(first, "staged")
    harness.sleep()
    harness.expect(second, "409 WeightsAsleep")
    harness.wake()


def one_rank_cannot_stage(harness: Harness, rank: int) -> None:
    harness.arm("fail_stage", rank)
    assert harness.outcome_of(harness.post(harness.parts()[0])).startswith("500 ")


def one_rank_cannot_write(harness: Harness, rank: int) -> None:
    harness.arm("fail_write", rank)
    harness.expect(harness.parts()[0], "500 WriteUndone")


def ranks_raise(harness: Harness) -> None:
    """Where nothing should, and before they vote."""
    for rank in range(RANKS):
        harness.arm("raise_commit", rank)
    assert harness.outcome_of(harness.post(harness.parts()[0])).startswith("500 ")


def one_rank_cannot_undo(harness: Harness, rank: int) -> None:
    harness.arm("fail_write", rank)
    harness.arm("fail_undo", rank)
    answer = harness.expect(harness.parts()[0], "500 CommitFailed")
    assert answer.json()["error"]["engine_state"] == "uncertain"


def gone_while_it_is_staged(harness: Harness) -> None:
    """The ranks take longer than the sender waits; what it began is done to its end."""
    harness.arm("slow_stage", 1)
    [body] = harness.parts()
    harness.killed_sender(harness.raw(body), reads=False, when=lambda: stalled(harness))


def gone_while_it_is_written(harness: Harness) -> None:
    harness.arm("slow_write", 1)
    [body] = harness.parts()
    harness.killed_sender(harness.raw(body), reads=False, when=lambda: stalled(harness))


def stalled(harness: Harness) -> bool:
    try:
        (harness.folder / "stalled-1").unlink()
    except FileNotFoundError:
        return False
    return True


def staged(harness: Harness) -> list[int]:
    """The parts that the engine says are staged."""
    sync = harness.engine.delta_status().staged
    return [] if sync is None else sync.parts


def flipped(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]


def rows(
    what: str, answer: str, ends: Ends, *cases: tuple[str, Callable[[Harness], None]]
) -> list[Fault]:
    return [Fault(name, what, answer, ends, do) for name, do in cases]


FAULTS = [
    *rows(
        "connection ended or reset at every tenth of a body",
        "nothing",
        "old",
        *((f"cut at {k} tenths", partial(Harness.cut, tenths=k)) for k in range(10)),
        *((f"reset at {k} tenths", partial(Harness.cut, tenths=k, reset=True)) for k in range(10)),
    ),
    *rows(
        "connection ended when all is sent",
        "nothing",
        "either",
        ("cut at the end", partial(Harness.cut, tenths=10)),
    ),
    *rows(
        "sender killed in a body, or between parts",
        "nothing",
        "old",
        ("killed in a body", killed_in_a_body),
        ("killed between parts", killed_between_parts),
    ),
    *rows(
        "sender killed while the ranks stage or write",
        "nothing",
        "new",
        ("killed while staging", gone_while_it_is_staged),
        ("killed while writing", gone_while_it_is_written),
    ),
    *rows(
        "sender killed after the commit, before it saw the answer",
        "`already_applied` when it sends again",
        "new",
        ("killed after the commit", killed_after_the_commit),
    ),
    *rows(
        "spool disk full",
        "507 `SpoolFull`",
        "old",
        ("spool full", spool_full),
        ("spool full at the second part", spool_full_at_the_second),
    ),
    *rows(
        "part corrupted or truncated",
        "400 `ChecksumMismatch` or `MalformedPart`",
        "old",
        ("corrupted data", corrupted_data),
        ("corrupted header", corrupted_header),
        ("corrupted second part", corrupted_second),
        ("truncated", truncated),
    ),
    *rows("parts in another order", "`committed`", "new", ("reordered", reordered)),
    *rows(
        "part sent twice, or four times at once",
        "one `committed`, the others `already_applied`",
        "new",
        ("duplicated", duplicated),
        ("duplicated at once", duplicated_at_once),
    ),
    *rows(
        "part missing",
        "`staged`; others get in after `--delta-tuning stage-timeout`",
        "old",
        ("missing", missing),
    ),
    *rows("part number again with other bytes", "409 `Conflict`", "old", ("other", other_bytes)),
    *rows(
        "stale or future part",
        "409 `VersionConflict`",
        "old",
        ("stale", stale),
        ("future", future),
    ),
    *rows(
        "two senders at once",
        "one `committed`, the other 409",
        "new",
        ("two senders", two_senders),
        ("two senders, parts", two_senders_between_parts),
    ),
    *rows(
        "sender of another run",
        "409 `RunConflict`, also for a full sync",
        "old",
        ("another run", another_run),
    ),
    *rows(
        "sender of another run that takes over between parts",
        "it gets the engine; the other one 409 `RunFenced` for good",
        "new",
        ("takeover", takeover),
    ),
    *rows(
        "engine asleep, or put to sleep between parts",
        "409 `WeightsAsleep`",
        "old",
        ("asleep", asleep),
        ("asleep between parts", asleep_between_parts),
    ),
    *rows(
        "one rank of two fails to stage",
        "500",
        "old",
        *((f"rank {k} cannot stage", partial(one_rank_cannot_stage, rank=k)) for k in range(RANKS)),
    ),
    *rows(
        "one rank of two fails in mid-commit",
        "500 `WriteUndone`",
        "old",
        *((f"rank {k} cannot write", partial(one_rank_cannot_write, rank=k)) for k in range(RANKS)),
    ),
    *rows("the commit raises on every rank", "500", "old", ("ranks raise", ranks_raise)),
    *rows(
        "one rank of two fails in mid-commit, and to undo",
        "500 `CommitFailed`",
        "uncertain",
        *((f"rank {k} cannot undo", partial(one_rank_cannot_undo, rank=k)) for k in range(RANKS)),
    ),
]
