"""One sync on one model, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine_ext.conformance.memory import Memory, different, memory
from engine_ext.conformance.subject import Rank, SubjectFactory
from engine_ext.conformance.syncs import Setup, Sync, checkpoints, deltas_of
from engine_ext.conformance.toy_models import UNTOUCHED, Checkpoint, ToyModel

EXACT: Final = "exact"
REFUSED: Final = "refused"
TORN: Final = "TORN"
WRONG: Final = "WRONG"
OUTCOMES: Final = (EXACT, REFUSED, TORN, WRONG)
"""From best to worst. The last two are violations.

exact: `apply` returned, and all memory of every rank is that of a model that was loaded from the
target checkpoint. refused: it raised, and no bit has changed. TORN: it raised after it had changed
something. WRONG: it returned, and some bit is not the target's.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, and where it shows."""

    outcome: str
    detail: str = ""


class _Start:
    """A model that an engine loads and processes."""

    def __init__(self, cls: type[ToyModel], checkpoint: Checkpoint) -> None:
        self.model = cls()
        self.steps: list[str] = []
        self._checkpoint = checkpoint

    @torch.no_grad()
    def load(self) -> None:
        self.steps.append("load")
        self.model.load_weights((n, t.clone()) for n, t in self._checkpoint.items())

    @torch.no_grad()
    def process(self) -> None:
        self.steps.append("process")
        self.model.after_loading()

    def in_service(self) -> Memory:
        """Give the buffer that only serving writes to its values; what the model holds then."""
        getattr(self.model, UNTOUCHED).copy_(torch.arange(5) + 0.5)
        return memory(self.model)


def judge(setup: Setup, sync: Sync, make: SubjectFactory) -> Verdict:
    """Serve the base checkpoint, apply the sync, and look.

    Raises:
        RuntimeError: the subject did not load and process every rank once.
    """
    base, target = checkpoints(setup, sync)
    starts = [_Start(cls, base) for cls in setup]
    subject = make()
    ranks = [
        Rank(s.model, {name: t.clone() for name, t in base.items()}, s.load, s.process)
        for s in starts
    ]
    try:
        subject.serve(ranks)
    except Exception as error:
        return Verdict(REFUSED, f"does not serve: {_brief(error)}")
    if any(start.steps != ["load", "process"] for start in starts):
        raise RuntimeError(f"{subject.name} must load and process every rank once")
    before = [start.in_service() for start in starts]
    if changed := _differences(before, [_fresh(cls, base) for cls in setup]):
        return Verdict(WRONG, f"serving changed {changed}")
    try:
        subject.apply(deltas_of(sync, base, target))
    except Exception as error:
        changed = _differences([memory(start.model) for start in starts], before)
        if changed:
            return Verdict(TORN, f"{changed}: {_brief(error)}")
        return Verdict(REFUSED, _brief(error))
    wrong = _differences(
        [memory(start.model) for start in starts], [_fresh(cls, target) for cls in setup]
    )
    return Verdict(WRONG, wrong) if wrong else Verdict(EXACT)


def worst(outcomes: list[str]) -> str:
    """The worst of some outcomes."""
    return max(outcomes, key=OUTCOMES.index)


def _fresh(cls: type[ToyModel], checkpoint: Checkpoint) -> Memory:
    start = _Start(cls, checkpoint)
    start.load()
    start.process()
    return start.in_service()


def _differences(now: Sequence[Memory], expected: Sequence[Memory]) -> str:
    return ", ".join(
        f"rank {rank}: {', '.join(names)}"
        for rank, (one, other) in enumerate(zip(now, expected, strict=True))
        if (names := different(one, other))
    )


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"
