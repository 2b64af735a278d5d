"""Rebuild the modules that a staged sync changes, before it is committed.

All ranks rebuild the same modules in the same order, a batch at a time, so that processing may
communicate and the engine serves between two batches. What comes out differently in live memory
becomes writes of the sync, which are voted on, committed and undone with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from engine_ext.apply.staged import StagedPart, Write
from engine_ext.errors import NotUpdatable
from engine_ext.model import StorageIndex
from engine_ext.placement import Placement
from engine_ext.ranks import Ranks
from engine_ext.rebuild import Place, Rebuild, Replacement

logger = logging.getLogger(__name__)

# Elements of the shadow that one batch rebuilds, at least.
_BATCH: Final = 1 << 22


class Rebuilds:
    """The modules of one rank that are computed from checkpoint tensors.

    Args:
        model: the live model, and its index, made before the certification.
        rebuilds: the proven ones on this rank.
        placement: of the checkpoint, in the shadow where a module is rebuilt.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        rebuilds: Sequence[Rebuild],
        placement: Placement,
        ranks: Ranks,
    ) -> None:
        self._model, self._index = model, index
        self._by_path = {one.path: one for one in rebuilds}
        # Of what was found to differ some time: it is written then, or by a rollback.
        self._places: dict[str, Place] = {}
        live = {n: {s.live.name for s in p.segments} for n, p in placement.items()}
        own = {
            path: (one.numel, [n for n, names in live.items() if any(map(one.holds, names))])
            for path, one in self._by_path.items()
        }
        # Agreed, so that all ranks reach the same batches: path, elements, checkpoint tensors.
        self._order: dict[str, tuple[int, set[str]]] = {}
        for found in ranks.all_gather(own):
            for path, (numel, names) in found.items():
                most, known = self._order.get(path, (0, set()))
                self._order[path] = (max(most, numel), known.union(names))

    def moved(self) -> list[str]:
        """Return the live tensors that are not where they were at start-up, by name.

        Those that are no parameters or buffers count from the first rebuild that they differed in.
        """
        elsewhere = [path for path, place in self._places.items() if not place.unchanged()]
        return self._index.moved(self._model) + elsewhere

    def pending(self, staged: Sequence[StagedPart]) -> list[str]:
        """Return the modules that must still be rebuilt for a sync, the same on every rank."""
        if not staged:
            return []
        sent = {param.delta.name for part in staged for param in part.params}
        done = staged[0].rebuilt
        return [p for p, (_, names) in self._order.items() if p not in done and names & sent]

    def rebuild_some(self, staged: Sequence[StagedPart]) -> None:
        """Rebuild the next batch of modules; the writes are added to the first part.

        Raises:
            NotUpdatable: a module cannot be rebuilt. Nothing was written.
        """
        left = _BATCH
        for path in self.pending(staged):
            if left <= 0:
                break
            left -= self._order[path][0]
            one = self._by_path.get(path)
            staged[0].rebuilt[path] = [] if one is None else self._rebuild(one, staged)

    def corrupted(self) -> list[str]:
        """Return the checkpoint tensors whose modules are not what processing makes of them.

        Rebuilds every module; all ranks must call it.
        """
        wrong: set[str] = set()
        for path, (_, names) in self._order.items():
            one = self._by_path.get(path)
            try:
                found = [] if one is None else one.rebuild({})
            except Exception:
                logger.exception("delta updates: %s cannot be rebuilt", path)
                wrong |= names
            else:
                if any(not isinstance(d.new, Replacement) for d in found):
                    wrong |= names
        return sorted(wrong)

    def _rebuild(self, one: Rebuild, staged: Sequence[StagedPart]) -> list[Write]:
        changes: dict[str, list[Write]] = {}
        writes = [write for part in staged for param in part.params for write in param.writes]
        for write in writes:
            if one.holds(write.live):
                changes.setdefault(one.name_within(write.live), []).append(write)
        try:
            found = one.rebuild(changes)
        except Exception as error:
            raise NotUpdatable(
                f"{one.path} cannot be rebuilt with the new weights: "
                f"{type(error).__name__}: {error}",
                module=one.path,
            ) from error
        keep = all(write.keep for write in writes)
        for difference in found:
            if difference.place is not None:
                self._places.setdefault(f"{one.path}.{difference.path}", difference.place)
        rebuilt = [Write(d.elements, d.new, "", keep) for d in found]
        for write in rebuilt:
            write.read_old()
        return rebuilt
