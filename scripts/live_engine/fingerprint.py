"""Compare every tensor of two live engines by the engines' own checksums.

Take one `Fingerprint` of an engine before it is updated and one afterwards, and one of a fresh
engine that loaded the trainer's checkpoint; `verify` says whether the update was exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console

from scripts.live_engine.process import EngineProcess

_SHA256_OF_NOTHING: Final = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of every live tensor of an engine, in hex.

    Attributes:
        parameters: by rank and name; persistent buffers too if the engine lists them here.
        buffers: the other registered buffers, by rank and name.
    """

    parameters: dict[str, str]
    buffers: dict[str, str]


def fingerprint(engine: EngineProcess) -> Fingerprint:
    """Ask a live engine for the checksums of all its tensors."""
    return Fingerprint(engine.checksums(), engine.buffer_checksums())


def verify(before: Fingerprint, live: Fingerprint, fresh: Fingerprint, console: Console) -> bool:
    """Return whether an updated engine holds exactly a fresh engine's bytes, and print why not.

    Args:
        before: the engine before the updates; at least one of its parameters must have changed.
        live: the engine after the updates.
        fresh: another engine that loaded the weights from disk.
        console: gets one line per tensor that differs, and the verdict.
    """
    problems = [
        f"{name}: differs from the fresh engine's"
        for ours, theirs in ((live.parameters, fresh.parameters), (live.buffers, fresh.buffers))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    problems += [
        f"{name}: its checksum is that of an empty tensor, which proves nothing"
        for name, checksum in live.parameters.items()
        if checksum == _SHA256_OF_NOTHING
    ]
    changed = sum(before.parameters.get(n) != c for n, c in live.parameters.items())
    if not changed:
        problems.append("no parameter changed since the start")
    for problem in problems:
        console.print(problem)
    verdict = "NOT VERIFIED" if problems else "VERIFIED: bit-identical"
    console.print(
        f"{verdict}; compared {len(live.parameters)} parameters ({changed} of them changed by the "
        f"deltas) and {len(live.buffers)} buffers with a fresh engine's"
    )
    return not problems
