"""The deaths of an engine's processes, one row each; few are survived by the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.faults.harness import RANKS, wait_until
from tests.faults.restarts import DEATH_S, Lives
from tests.faults.survivable import staged

# A process that an engine has beside its ranks and the one that serves HTTP.
OTHER = {"vLLM": "VLLM::EngineCore", "SGLang": "sglang::detokenizer"}

# SGLang's processes that serve HTTP, where it has several; it starts those again that die.
HTTP = "sglang::tokenizer_worker"

Ends: TypeAlias = Literal["old", "new", "log"]


@dataclass(frozen=True)
class Death:
    """One row of the matrix.

    Attributes:
        what: for the table; rows with the same text are one row there.
        told: what the sender is answered, for the table.
        ends: the version that an engine holds that is started again: the ``old`` or the ``new``
            one, or either of them, as the ``log`` says.
        do: begins the sync that the scene has stepped to, and kills.
        only: what the step changes: all tensors, in several parts, or those with this in the name.
        lingers: engines of which processes are left, which end when they are told to.
    """

    name: str
    what: str
    told: str
    ends: Ends
    do: Callable[[Lives], None]
    only: str = ""
    lingers: tuple[str, ...] = ()


def rank_while_it(fault: str, rank: int) -> Callable[[Lives], None]:
    """Kill a rank where this fault has stalled it."""

    def do(lives: Lives) -> None:
        lives.arm(fault, rank)
        lives.begin()
        lives.kill_stalled(rank)

    return do


def kill_other(lives: Lives) -> None:
    lives.kill_titled(OTHER[lives.engine.name])


def kill_http(lives: Lives) -> None:
    lives.kill_titled(HTTP)


def between_parts(
    kill: Callable[[Lives], None], *, outlived: bool = False
) -> Callable[[Lives], None]:
    """Kill, and let the sender go on, once the server has ended if the death is not outlived."""

    def do(lives: Lives) -> None:
        lives.begin(halts=True)
        wait_until(lambda: staged(lives) == [0])
        kill(lives)
        assert outlived or lives.engine.wait(DEATH_S)
        lives.go_on()

    return do


def in_mid_commit(
    kill: Callable[[Lives], None], fault: str = "stall_write"
) -> Callable[[Lives], None]:
    """Kill while rank 1 has this fault."""

    def do(lives: Lives) -> None:
        lives.arm(fault, 1)
        lives.begin()
        stalled = lives.folder / "stalled-1"
        wait_until(stalled.exists)
        kill(lives)
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
        between_parts(Lives.kill_server),
        lingers=("vLLM",),
    ),
    Death(
        "API server killed in mid-commit",
        "API server killed in mid-commit",
        "nothing",
        "new",
        in_mid_commit(Lives.kill_server),
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
        in_mid_commit(Lives.kill_all),
    ),
]

# The engine outlives these.
RESPAWNS = [
    Death(
        f"all HTTP processes killed {when}",
        "all of SGLang's several HTTP processes killed between parts, or in mid-commit",
        "`already_applied`, by those that it starts in their place",
        "new",
        do,
    )
    for when, do in (
        ("between parts", between_parts(kill_http, outlived=True)),
        ("in mid-commit", in_mid_commit(kill_http, "slow_write")),
    )
]
