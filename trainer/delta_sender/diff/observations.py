"""Notice what is a mistake mostly in what a trainer gives: no change, NaN, values that are rounded.

Only values that have changed are looked at, after they were compared. Values are rounded where they
are cast to the checkpoint's dtypes, which is counted here too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import torch

from delta_sender.diff.change import Bits, Change
from engine_ext.structs import prepare


@dataclass
class Rounded:
    """Tensors that were given in a wider dtype than the checkpoint has, and so are rounded.

    Attributes:
        tensors: How many.
        elements: Number of elements in them.
        first: Name and dtypes of the first one.
    """

    tensors: int = 0
    elements: int = 0
    first: str = ""


_counted: ContextVar[Rounded | None] = ContextVar("rounded", default=None)


@contextmanager
def counting() -> Iterator[Rounded]:
    """Count what this thread rounds inside the block, also in generators that it reads."""
    rounded = Rounded()
    before = _counted.set(rounded)
    try:
        yield rounded
    finally:
        _counted.reset(before)


def count(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Count a tensor that is about to be cast, if the cast rounds."""
    rounded = _counted.get()
    if rounded is not None and torch.promote_types(tensor.dtype, dtype) != dtype:
        rounded.first = rounded.first or f"{name}, {tensor.dtype} to {dtype}".replace("torch.", "")
        rounded.tensors += 1
        rounded.elements += tensor.numel()


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the checkpoint's dtype, rounded to nearest even; maybe no copy."""
    if tensor.dtype == dtype:
        return tensor
    count(name, tensor, dtype)
    return tensor.to(dtype)


logger = logging.getLogger(__name__)

Found = Iterable[tuple[str, Change | None]]

# Bits that are all set in NaN and infinity (in NaN, if the dtype has no infinity), by dtype.
_EXPONENT: Final = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7C,
    "float8_e8m0fnu": 0xFF,
}


def exponent_of(dtype: str) -> int:
    """Return the bits that are all set in each NaN and infinity of a manifest dtype.

    They are set in NaN alone, if it has no infinity; 0: it has neither.
    """
    return _EXPONENT.get(dtype, 0)


UNCHANGED: Final = (
    "no value has changed in %d syncs in a row. Usual causes: an optimizer that steps copies of "
    "the tensors given here; an adapter that is not merged into them; only the base's tensors are "
    "given; steps too small for the checkpoint's dtype, or a learning rate of 0"
)
_AT_ONCE: Final = 1 << 16  # elements; intermediate results stay in a core's cache
_TOGETHER: Final = 256  # changes, at most


@dataclass(frozen=True)
class Observed:
    """What one sync has shown.

    Attributes:
        tensors: Number of tensors that were given.
        changed: Number of tensors that have changed.
        nonfinite: Number of values that have become NaN or infinite.
        first_nonfinite: Name of the first tensor with such a value; "" if there is none.
        rounded: Tensors that were rounded to the checkpoint's dtypes.
        unchanged_in_a_row: Number of syncs, up to this one, in which nothing has changed.
    """

    tensors: int = 0
    changed: int = 0
    nonfinite: int = 0
    first_nonfinite: str = ""
    rounded: Rounded = field(default_factory=Rounded)
    unchanged_in_a_row: int = 0

    def in_report(self) -> dict[str, Any]:
        """Return the fields of `SyncReport` that this determines."""
        return {
            "unchanged_in_a_row": self.unchanged_in_a_row,
            "nonfinite": self.nonfinite,
            "rounded": self.rounded.elements,
        }

    @classmethod
    def total(cls, ranks: Sequence[Observed]) -> Observed:
        """Return what all ranks have shown together, before it was noted."""
        rounded = [one.rounded for one in ranks]
        return cls(
            tensors=sum(one.tensors for one in ranks),
            changed=sum(one.changed for one in ranks),
            nonfinite=sum(one.nonfinite for one in ranks),
            first_nonfinite=next((n for one in ranks if (n := one.first_nonfinite)), ""),
            rounded=Rounded(
                sum(one.tensors for one in rounded),
                sum(one.elements for one in rounded),
                next((one.first for one in rounded if one.first), ""),
            ),
        )


prepare(Observed)


class Round(Protocol):
    """The part of `SyncRound` that a watch uses."""

    observed: Observed

    def read(self, tensors: Found) -> None:
        """Take in what `Snapshot.read` yields."""


class Watch:
    """Watches the syncs of one sender; the log gets each thing that it notices once."""

    def __init__(self, *, refuses_nonfinite: bool, warns_after: int) -> None:
        self._refuses_nonfinite, self._warns_after = refuses_nonfinite, warns_after
        self._unchanged = 0
        self._logged: set[str] = set()

    def read(self, sync_round: Round, found: Found, *, is_share: bool = False) -> None:
        """Let a round read what `Snapshot.read` yields, and set what it has shown.

        Args:
            is_share: Whether other ranks read the rest; `note` is called with the total then.

        Raises:
            ValueError: A value has become NaN or infinite, and such syncs are refused.
        """
        with counting() as rounded:
            sync_round.read(self._observed(sync_round, found, rounded, is_share))

    def _observed(
        self, sync_round: Round, found: Found, rounded: Rounded, is_share: bool
    ) -> Iterator[tuple[str, Change | None]]:
        tensors = changed = elements = 0
        nonfinite: dict[str, int] = {}  # by name
        waiting: list[tuple[str, Change]] = []
        for key, change in found:
            tensors += 1
            if change is not None:
                changed += 1
                elements += change.nnz
                waiting.append((key, change))
                if elements >= _AT_ONCE or len(waiting) >= _TOGETHER:
                    self._look(waiting, nonfinite)
                    waiting, elements = [], 0
            yield key, change
        self._look(waiting, nonfinite)
        first = next(iter(nonfinite), "")
        observed = Observed(tensors, changed, sum(nonfinite.values()), first, rounded)
        # Senders see it as soon as the round is complete.
        sync_round.observed = observed if is_share else self.note(observed)

    def _look(self, changes: Sequence[tuple[str, Change]], nonfinite: dict[str, int]) -> None:
        """Count the values of some changes that have become NaN or infinite, by name.

        Raises:
            ValueError: There are some, and they are refused.
        """
        if not _may_have_nonfinite([change for _, change in changes]):
            return
        for key, change in changes:
            if count := count_nonfinite(change):
                if self._refuses_nonfinite:
                    reason = "values have become NaN or infinite, which refuse_nonfinite refuses"
                    raise ValueError(f"{key}: {count} {reason}")
                nonfinite[key] = count

    def note(self, observed: Observed, *, logs: bool = True) -> Observed:
        """Count syncs without a change, and write what is noticed first to the log if `logs`."""
        self._unchanged = 0 if observed.changed else self._unchanged + 1
        if logs:
            if self._unchanged and self._unchanged == self._warns_after:
                logger.warning(UNCHANGED, self._unchanged)
            if observed.nonfinite and self._is_new("nonfinite"):
                logger.warning(
                    "%s: the first NaN or infinite value; %d values of this sync have become so. "
                    "They are sent as they are; refuse_nonfinite=True (--refuse-nonfinite) refuses "
                    "such a sync, POST /delta_rollback restores the version before it",
                    observed.first_nonfinite,
                    observed.nonfinite,
                )
            if observed.rounded.tensors and self._is_new("rounded"):
                self._log_rounded(observed)
        return replace(observed, unchanged_in_a_row=self._unchanged)

    def _log_rounded(self, observed: Observed) -> None:
        """Masters in a wider dtype are the rule; a few tensors in one are not."""
        rounded = observed.rounded
        level = logging.INFO if 2 * rounded.tensors > observed.tensors else logging.WARNING
        logger.log(
            level,
            "%d of %d tensors (%d values) are rounded to the checkpoint's dtype; the first: %s. An "
            "engine gets more only if its checkpoint has them in the wider dtype",
            rounded.tensors,
            observed.tensors,
            rounded.elements,
            rounded.first,
        )

    def _is_new(self, what: str) -> bool:
        is_new = what not in self._logged
        self._logged.add(what)
        return is_new


def _may_have_nonfinite(changes: Sequence[Change]) -> bool:
    """Whether to look at each of some changes: many small ones are looked at together."""
    small: dict[str, list[Bits]] = {}
    for change in changes:
        if change.nonfinite is not None:
            if change.nonfinite:
                return True
            continue
        new = change.decoded().new
        if new.size >= _AT_ONCE:
            return True
        small.setdefault(change.dtype, []).append(new)
    for dtype, values in small.items():
        exponent = _EXPONENT.get(dtype)
        if exponent is not None:
            joined = np.concatenate(values)
            mask = joined.dtype.type(exponent)
            if ((joined & mask) == mask).any():
                return True
    return False


def count_nonfinite(change: Change) -> int:
    """Return how many values have become NaN or infinite by a change."""
    exponent = _EXPONENT.get(change.dtype)
    if change.nonfinite is not None or exponent is None:
        return change.nonfinite or 0
    elements = change.decoded()
    mask, count = elements.new.dtype.type(exponent), 0
    for start in range(0, elements.new.size, _AT_ONCE):
        new = elements.new[start : start + _AT_ONCE]
        found = (new & mask) == mask
        if found.any():
            if elements.indices is None:  # `new` has values that have not changed, too
                found &= new != elements.old[start : start + _AT_ONCE]
            count += int(np.count_nonzero(found))
    return count
