"""Deaths of an engine's processes, one row each; the engine survives only `RESPAWNS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.faults.observed import RANKS, wait_until
from tests.faults.restarts import DEATH_S, RestartHarness
from tests.faults.survivable import staged

# A process of the engine that is neither a rank nor serves HTTP.
OTHER = {"vLLM": "VLLM::EngineCore", "SGLang": "sglang::detokenizer"}

# SGLang's processes that serve HTTP, if it has several; it restarts those that die.
HTTP = "sglang::tokenizer_worker"

Ends: TypeAlias = Literal["old", "new", "log"]


@dataclass(frozen=True)
class Death:
    """One row of the matrix.

    Attributes:
        what: text in the table; rows with the same text are merged.
        answer: the reply to the sender, as text in the table.
        ends: the version of the restarted engine: ``old``, ``new``, or the newest of the ``log``.
        do: starts the sync of the current step, and kills.
        only: the step changes only tensors with this in their names, so that one part is enough.
        lingers: engines with processes that end on SIGTERM only.
    """

    name: str
    what: str
    answer: str
    ends: Ends
    do: Callable[[RestartHarness], None]
    only: str = ""
    lingers: tuple[str, ...] = ()


def rank_while_it(fault: str, rank: int) -> Callable[[RestartHarness], None]:
    """Kill a rank while a fault stalls it."""

    def do(harness: RestartHarness) -> None:
        harness.arm(fault, rank)
        harness.begin()
        harness.kill_stalled(rank)

    return do


def kill_other(harness: RestartHarness) -> None:
    harness.kill_titled(OTHER[harness.engine.name])


def kill_http(harness: RestartHarness) -> None:
    harness.kill_titled(HTTP)


def between_parts(
    kill: Callable[[RestartHarness], None], *, survived: bool = False
) -> Callable[[RestartHarness], None]:
    """Kill when one part is staged and others are about to be posted.

    The sender then posts them; if the engine does not survive, after its end.
    """

    def do(harness: RestartHarness) -> None:
        harness.begin(halts=True)
        wait_until(lambda: len(staged(harness)) == 1)
        kill(harness)
        assert survived or harness.engine.wait(DEATH_S)
        harness.go_on()

    return do


def in_mid_commit(
    kill: Callable[[RestartHarness], None], fault: str = "stall_write"
) -> Callable[[RestartHarness], None]:
    """Kill while a fault stalls or slows down rank 1."""

    def do(harness: RestartHarness) -> None:
        harness.arm(fault, 1)
        harness.begin()
        stalled = harness.folder / "stalled-1"
        wait_until(stalled.exists)
        kill(harness)
        stalled.unlink()

    return do


DEATHS = [
    *(
        Death(
            f"rank {rank} killed while it stages a first part",
            "one rank killed while it stages one of several parts",
            "500, or nothing",
            "old",
            rank_while_it("stall_stage", rank),
        )
        for rank in range(RANKS)
    ),
    Death(
        "rank 1 killed while it stages all there is",
        "one rank killed while it stages the last part",
        "500, or nothing",
        "log",
        rank_while_it("stall_stage", 1),
        only="norm",
    ),
    *(
        Death(
            f"rank {rank} killed in mid-commit",
            "one rank killed in mid-commit",
            "500, or nothing",
            "log",
            rank_while_it("stall_write", rank),
        )
        for rank in range(RANKS)
    ),
    *(
        Death(
            f"rank {rank} killed after the commit",
            "one rank killed after the commit, before the sender saw the answer",
            "500, or nothing",
            "log",
            rank_while_it("stall_answer", rank),
        )
        for rank in range(RANKS)
    ),
    Death(
        "API server killed between parts",
        "API server killed between parts",
        "nothing",
        "old",
        between_parts(RestartHarness.kill_server),
        lingers=("vLLM",),
    ),
    Death(
        "API server killed in mid-commit",
        "API server killed in mid-commit",
        "nothing",
        "new",
        in_mid_commit(RestartHarness.kill_server),
        lingers=("vLLM",),
    ),
    Death(
        "other process killed between parts",
        "vLLM's engine core, or SGLang's detokenizer, killed between parts",
        "500, or nothing",
        "old",
        between_parts(kill_other),
    ),
    Death(
        "all killed in mid-commit",
        "every process killed in mid-commit",
        "nothing",
        "new",
        in_mid_commit(RestartHarness.kill_all),
    ),
]

# The engine survives these.
RESPAWNS = [
    Death(
        f"all HTTP processes killed {when}",
        "all of SGLang's several HTTP processes killed between parts, or in mid-commit",
        "`already_applied`, by those that it starts in their place",
        "new",
        do,
    )
    for when, do in (
        ("between parts", between_parts(kill_http, survived=True)),
        ("in mid-commit", in_mid_commit(kill_http, "slow_write")),
    )
]
