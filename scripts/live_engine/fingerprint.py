"""Checksums of everything a live engine holds, to compare two engines with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scripts.live_engine.process import EngineProcess

_SHA256_OF_NOTHING: Final = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of every live tensor of an engine, by rank and name."""

    parameters: dict[str, str]
    buffers: dict[str, str]


def fingerprint(engine: EngineProcess) -> Fingerprint:
    """Checksums of all that the engine computes with."""
    return Fingerprint(engine.checksums(), engine.buffer_checksums())
