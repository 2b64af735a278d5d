"""The faults that an engine must outlive, one row each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from tests.faults.harness import RANKS, STAGE_TIMEOUT, Scene, fill
from tests.support.plain_trainer import edited

Ends: TypeAlias = Literal["old", "new", "either", "uncertain"]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        what: for the table; rows with the same text are one row there.
        told: what the sender is answered, for the table.
        ends: the version that the engine holds afterwards: the ``old`` or the ``new`` one, either
            of them, or the fault leaves it ``uncertain``.
        do: meets the sync that the scene has stepped to, and checks the answers.
    """

    name: str
    what: str
    told: str
    ends: Ends
    do: Callable[[Scene], None]


def killed_in_a_body(scene: Scene) -> None:
    request = scene.raw(scene.parts()[0])
    scene.killed_sender(request[: len(request) // 2], reads=False, when=lambda: True)


def killed_between_parts(scene: Scene) -> None:
    first, _ = scene.parts(2)
    scene.killed_sender(scene.raw(first), reads=True, when=lambda: staged(scene) == [0])


def killed_after_the_commit(scene: Scene) -> None:
    after = scene.base_version + 1
    [body] = scene.parts()
    scene.killed_sender(scene.raw(body), reads=False, when=lambda: scene.version() == after)
    # The one who comes next sends the same, and is told that it is there.
    scene.is_told(body, "already_applied")


def spool_full(scene: Scene) -> None:
    full_for(scene, scene.parts()[0])


def spool_full_at_the_second(scene: Scene) -> None:
    first, second = scene.parts(2)
    scene.is_told(first, "staged")
    full_for(scene, second)


def full_for(scene: Scene, body: bytes) -> None:
    filler = fill(scene.spool())
    try:
        scene.is_told(body, "507 SpoolFull")
    finally:
        filler.unlink()


def corrupted_data(scene: Scene) -> None:
    [body] = scene.parts()
    for at in (len(body) - 1, len(body) - 100):
        scene.is_told(flipped(body, at), "400 ChecksumMismatch")


def corrupted_header(scene: Scene) -> None:
    """All over it, as the sender hashes the metadata too; only its key is not in its own hash."""
    [body] = scene.parts(manifest_checksum=True)
    key = body.index(b"manifest_checksum")
    for at in range(0, 8 + int.from_bytes(body[:8], "little"), 97):
        if not key <= at < key + len("manifest_checksum"):
            assert scene.told(scene.post(flipped(body, at)))[:3] in ("400", "413")


def truncated(scene: Scene) -> None:
    [body] = scene.parts()
    for length in (0, 7, 100, len(body) // 2, len(body) - 1):
        scene.is_told(body[:length], "400 MalformedPart")


def corrupted_second(scene: Scene) -> None:
    first, second = scene.parts(2)
    scene.is_told(first, "staged")
    scene.is_told(flipped(second, len(second) - 1), "400 ChecksumMismatch")


def reordered(scene: Scene) -> None:
    parts = scene.parts(3)
    scene.is_told(parts[2], "staged")
    scene.is_told(parts[0], "staged")
    scene.is_told(parts[1], "committed")


def duplicated(scene: Scene) -> None:
    first, second = scene.parts(2)
    scene.is_told(first, "staged")
    scene.is_told(first, "staged")
    scene.is_told(second, "committed")
    scene.is_told(second, "already_applied")
    scene.is_told(first, "already_applied")


def duplicated_at_once(scene: Scene) -> None:
    [body] = scene.parts()
    with ThreadPoolExecutor(4) as pool:
        told = sorted(map(scene.told, pool.map(scene.post, [body] * 4)))
    assert told == [*["already_applied"] * 3, "committed"]


def missing(scene: Scene) -> None:
    parts = scene.parts(3)
    scene.is_told(parts[0], "staged")
    scene.is_told(parts[2], "staged")


def other_bytes(scene: Scene) -> None:
    first, second = scene.parts(2, sync_id="one")
    scene.is_told(first, "staged")
    scene.is_told(edited(second, part="0"), "409 Conflict")


def stale(scene: Scene) -> None:
    [body] = scene.parts()
    old = str(scene.base_version)
    # Another's way to the version that the engine is at, and one from further back.
    before = str(scene.base_version - 1)
    scene.is_told(edited(body, current_version=old, base_version=before), "409 VersionConflict")
    scene.is_told(edited(body, base_version=before), "409 VersionConflict")


def future(scene: Scene) -> None:
    [body] = scene.parts()
    there, next_one = str(scene.base_version + 1), str(scene.base_version + 2)
    answer = scene.is_told(
        edited(body, current_version=next_one, base_version=there), "409 VersionConflict"
    )
    assert answer.json()["error"]["actual"] == scene.base_version


def two_senders(scene: Scene) -> None:
    """Both have whole syncs to a version, of other weights; one of them wins."""
    syncs = []
    for encoding in ("deltas", "indices"):
        syncs.append((dict(scene.trainer.tensors), scene.parts(encoding=encoding)))
        scene.other_values()
    with ThreadPoolExecutor(2) as pool:
        told = [scene.told(answer) for answer in pool.map(scene.post, [b for _, [b] in syncs])]
    won = told.index("committed")
    assert told[1 - won] in ("409 VersionConflict", "409 SyncInProgress")
    scene.trainer.tensors, scene.sent = syncs[won]


def two_senders_between_parts(scene: Scene) -> None:
    tensors = dict(scene.trainer.tensors)
    first, second = sent = scene.parts(2)
    scene.other_values()
    [other] = scene.parts()
    scene.is_told(first, "staged")
    answer = scene.is_told(other, "409 SyncInProgress")
    assert 1 <= int(answer.headers["Retry-After"]) <= STAGE_TIMEOUT
    scene.is_told(second, "committed")
    scene.trainer.tensors, scene.sent = tensors, sent


def asleep(scene: Scene) -> None:
    [body] = scene.parts()
    scene.sleep()
    scene.is_told(body, "409 WeightsAsleep")
    scene.wake()


def asleep_between_parts(scene: Scene) -> None:
    first, second = scene.parts(2)
    scene.is_told(first, "staged")
    scene.sleep()
    scene.is_told(second, "409 WeightsAsleep")
    scene.wake()


def one_rank_cannot_stage(scene: Scene, rank: int) -> None:
    scene.arm("fail_stage", rank)
    assert scene.told(scene.post(scene.parts()[0])).startswith("500 ")


def one_rank_cannot_write(scene: Scene, rank: int) -> None:
    scene.arm("fail_write", rank)
    scene.is_told(scene.parts()[0], "500 WriteUndone")


def ranks_raise(scene: Scene) -> None:
    """Where nothing should, and before they vote."""
    for rank in range(RANKS):
        scene.arm("raise_commit", rank)
    assert scene.told(scene.post(scene.parts()[0])).startswith("500 ")


def one_rank_cannot_undo(scene: Scene, rank: int) -> None:
    scene.arm("fail_write", rank)
    scene.arm("fail_undo", rank)
    answer = scene.is_told(scene.parts()[0], "500 CommitFailed")
    assert answer.json()["error"]["engine_state"] == "uncertain"


def gone_while_it_is_staged(scene: Scene) -> None:
    """The ranks take longer than the sender waits; what it began is done to its end."""
    scene.arm("slow_stage", 1)
    [body] = scene.parts()
    scene.killed_sender(scene.raw(body), reads=False, when=lambda: stalled(scene))


def gone_while_it_is_written(scene: Scene) -> None:
    scene.arm("slow_write", 1)
    [body] = scene.parts()
    scene.killed_sender(scene.raw(body), reads=False, when=lambda: stalled(scene))


def stalled(scene: Scene) -> bool:
    file = scene.folder / "stalled-1"
    found = file.exists()
    file.unlink(missing_ok=True)
    return found


def staged(scene: Scene) -> list[int]:
    """The parts that the engine says are staged."""
    sync = scene.engine.delta_status()["staged"]
    return [] if sync is None else sync["parts"]


def flipped(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]


def rows(
    what: str, told: str, ends: Ends, *cases: tuple[str, Callable[[Scene], None]]
) -> list[Fault]:
    return [Fault(name, what, told, ends, do) for name, do in cases]


FAULTS = [
    *rows(
        "connection ended or reset at every tenth of a body",
        "nothing",
        "old",
        *((f"cut at {k} tenths", partial(Scene.cut, tenths=k)) for k in range(10)),
        *((f"reset at {k} tenths", partial(Scene.cut, tenths=k, reset=True)) for k in range(10)),
    ),
    *rows(
        "connection ended when all is sent",
        "nothing",
        "either",
        ("cut at the end", partial(Scene.cut, tenths=10)),
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
        "`staged`; others get in after `--delta-stage-timeout`",
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
        "two senders",
        "one `committed`, the other 409",
        "new",
        ("two senders", two_senders),
        ("two senders, parts", two_senders_between_parts),
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
