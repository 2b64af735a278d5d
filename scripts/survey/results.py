"""The survey's results, and their file."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from scripts.survey.architectures import ARCHITECTURES

STORED: Final = Path(__file__).with_name("results.json")
UPDATED: Final = ("exact", "cast", "rebuilt")
STATUSES: Final = (*UPDATED, "ignored", "uncertified")


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result for one architecture's model.

    Attributes:
        name: of the architecture.
        implementation: vLLM's class.
        counts: of tensors, by status; empty if vLLM could not load the model.
        refused: why tensors are uncertified, by name.
        ignored: the tensors that the loader drops.
        failure: why there are no counts.
    """

    name: str
    implementation: str = ""
    counts: dict[str, int] = {}
    refused: dict[str, str] = {}
    ignored: list[str] = []
    failure: str = ""

    @property
    def unexplained(self) -> dict[str, str]:
        """The refused tensors for which `ARCHITECTURES` accepts no reason."""
        accepted = ARCHITECTURES[self.name].accepted
        return {
            tensor: reason
            for tensor, reason in self.refused.items()
            if not any(fnmatch.fnmatchcase(tensor, pattern) for pattern in accepted)
        }

    @property
    def signature(self) -> tuple[int, tuple[str, ...], tuple[str, ...], bool]:
        """The results that are the same on every CPU: tensors updated, ignored, refused; a failure.

        Without AVX512-BF16, vLLM has fewer modules to rebuild.
        """
        updated = sum(self.counts.get(status, 0) for status in UPDATED)
        return updated, tuple(self.ignored), tuple(sorted(self.refused)), bool(self.failure)


def from_plan(name: str, implementation: str, rows: Iterable[Mapping[str, Any]]) -> Result:
    """Return the result of a plan; see `engine_ext.cli.plan.merge`.

    A tied tensor counts once: the checkpoints do not hold its other names.
    """
    rows = [row for row in rows if not row.get("tied_to")]
    return Result(
        name,
        implementation,
        dict(Counter(row["status"] for row in rows)),
        {row["name"]: row["reason"] for row in rows if row["status"] == "uncertified"},
        [row["name"] for row in rows if row["status"] == "ignored"],
    )


def stored() -> list[Result]:
    """Return the results in the repository, in the order of `ARCHITECTURES`."""
    return msgspec.json.decode(STORED.read_bytes(), type=list[Result])


def store(results: Iterable[Result]) -> None:
    """Write results to the repository; those of other architectures in `ARCHITECTURES` stay."""
    known = {result.name: result for result in (stored() if STORED.exists() else ())}
    known |= {result.name: result for result in results}
    kept = [msgspec.to_builtins(known[name]) for name in ARCHITECTURES if name in known]
    STORED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def shown(status: str) -> str:
    """Return a status as readers of the survey know it."""
    return "refused" if status == "uncertified" else status


def summary(results: Sequence[Result]) -> str:
    """Return one line about all results."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.counts)
    loaded = sum(not result.failure for result in results)
    found = ", ".join(f"{counts[status]} {shown(status)}" for status in STATUSES)
    return f"{loaded} of {len(results)} architectures loaded: {counts.total()} tensors: {found}"
