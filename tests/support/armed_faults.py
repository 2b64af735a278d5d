"""Arm the faults of ``tests/shims/faults`` from outside the engine."""

from __future__ import annotations

from pathlib import Path


def arm(folder: Path, fault: str, rank: int, text: str = "") -> None:
    """Let a fault happen in a rank.

    The file is whole when it is there: a rank that is asked meanwhile takes it away, and would
    find no text in one that is still being written.

    Args:
        folder: ``DELTA_FAULTS`` of the engine.
        fault: its name.
        rank: where.
        text: the argument of the fault.
    """
    unfinished = folder / f"{fault}-{rank}.new"
    unfinished.write_text(text)
    unfinished.rename(folder / f"{fault}-{rank}")
