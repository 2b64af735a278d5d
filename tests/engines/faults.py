"""A vLLM worker extension that makes things go wrong inside one rank.

Given to a server with ``--worker-extension-cls``, called by its development RPC route.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Faults:
    """Worker methods; `self` is the worker. Each takes the rank it is meant for, as text."""

    def fail_next_write(self, rank: str) -> str:
        """Let the next commit raise on this rank after one of its writes."""

        def fail() -> None:
            raise OSError("the memory went away")

        return _after_one_write(self, rank, fail)

    def stall_next_write(self, rank: str, reached: str) -> str:
        """Let the next commit hang on this rank after one of its writes; the answer is its pid.

        The file `reached` is made there and then.
        """

        def stall() -> None:
            Path(reached).touch()
            time.sleep(600)

        return _after_one_write(self, rank, stall)

    def fail_next_undo(self, rank: str) -> str:
        """Let the next undo raise on this rank."""
        if not _meant(self, rank):
            return "other rank"
        applier = _applier(self)
        original = applier.undo

        def undo(staged: Any) -> None:
            applier.undo = original
            raise OSError("the old values went away")

        applier.undo = undo
        return "armed"

    def flip_a_bit(self, rank: str, name: str, offset: str) -> str:
        """Flip the lowest bit of one element of a live parameter, as a cosmic ray would."""
        if not _meant(self, rank):
            return "other rank"
        from engine_ext.kernels import bits_of

        flat = bits_of(_applier(self)._index.by_name[name].flat())
        flat[int(offset)] ^= 1
        return "flipped"


def _meant(worker: Any, rank: str) -> bool:
    return bool(worker.rank == int(rank))


def _applier(worker: Any) -> Any:
    return worker.delta_receiver._applier


def _after_one_write(worker: Any, rank: str, then: Callable[[], None]) -> str:
    if not _meant(worker, rank):
        return "other rank"
    applier = _applier(worker)
    original = applier.write

    def write(staged: Any) -> None:
        applier.write = original
        staged[0].writes[0].put()
        then()

    applier.write = write
    return str(os.getpid())
