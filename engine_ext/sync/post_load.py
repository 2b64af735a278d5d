"""What the engine computed from weights after loading, on one rank, and how it follows a sync.

There are two kinds. A module whose weights the engine has processed is rebuilt before the commit,
from a copy of its unprocessed weights. Tensors that the engine derives from live weights and keeps
are recomputed in the commit, once these are written: the engine's own function reads live memory,
which a rebuilt module might have changed, too. So neither a copy of the weights nor an undo log of
the derived tensors is kept.

All ranks rebuild the same modules in the same order, a batch at a time, so that processing can
communicate and the engine serves between two batches. The differences from live memory become
writes of the sync, which are voted on, committed and undone with the others.

Each module is rebuilt twice: first from the weights as they are, which must give what they gave the
last time. So the proof of start-up is repeated before anything relies on it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import torch

from engine_ext.errors import NotUpdatable
from engine_ext.model import StorageIndex
from engine_ext.placement import DeviceMemory, Placement, uncertified
from engine_ext.ranks import RankGroup, run_on_all_or_none
from engine_ext.startup import LockstepRunner, Rebuild, RebuildError, Recomputed, module_place
from engine_ext.sync.device_table import keep_on_device
from engine_ext.sync.staged import StagedModule, StagedPart, Write
from engine_ext.sync.totals import part_totals, totals
from engine_ext.sync.writes import PartWrites, batch_unread, read_old

logger = logging.getLogger(__name__)

# Elements of unprocessed weights that one batch rebuilds, at least.
_BATCH: Final = 1 << 22


class PostLoad:
    """The modules and tensors of one rank that are computed from the checkpoint; all ranks make it.

    Args:
        model: the live model, and its index, made before the certification.
        placement: of the checkpoint, in unprocessed weights where a module is rebuilt.
        rebuilds: the proven ones on this rank.
        recomputed: what is proven to be recomputed from live weights on this rank.
        memory: of devices, for what a sync keeps there; None: nothing is reserved.

    Attributes:
        model: the live model.
        recomputed: see above.
        checks_first: whether some rank recomputes something. Then all old values are compared
            before anything is written: an undo computes again, and if something else had changed
            weights and not what is computed from them, that would not become what it was.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        placement: Placement,
        ranks: RankGroup,
        *,
        rebuilds: Sequence[Rebuild] = (),
        recomputed: Sequence[Recomputed] = (),
        memory: DeviceMemory | None = None,
    ) -> None:
        self.model, self._index, self._ranks = model, index, ranks
        self.recomputed = recomputed
        self._memory = memory or DeviceMemory()
        self.checks_first = any(ranks.all_gather(bool(recomputed)))
        self._lockstep = LockstepRunner(ranks)
        self._by_path = {one.path: one for one in rebuilds}
        # The modules themselves, and what was found to differ some time: that is written then, or
        # by a rollback.
        self._places = {
            path: module_place(model, path)
            for path, one in self._by_path.items()
            if one.module is not None
        }
        # The result of rebuilding each from the weights as they are; not known after other changes.
        self._known: dict[str, Mapping[str, str]] = {
            path: one.proven for path, one in self._by_path.items()
        }
        live = {n: {s.live.name for s in p.segments} for n, p in placement.items()}
        own = {
            path: (one.numel, [n for n, names in live.items() if not names.isdisjoint(one.names)])
            for path, one in self._by_path.items()
        }
        refused = {
            name for found in ranks.all_gather(list(uncertified(placement))) for name in found
        }
        # Agreed, so that all ranks reach the same batches: path, elements, checkpoint tensors.
        self._order: dict[str, tuple[int, set[str]]] = {}
        for found in ranks.all_gather(own):
            for path, (numel, names) in found.items():
                most, known = self._order.get(path, (0, set()))
                if not refused.issuperset(names):
                    self._order[path] = (max(most, numel), known.union(names) - refused)

    def contains(self, name: str) -> bool:
        """Return whether a tensor, given by its name in the model, is in a rebuilt module."""
        return any(one.contains(name) for one in self._by_path.values())

    def sources(self, name: str) -> set[str]:
        """Return the checkpoint tensors that a rebuilt module on or above a path is made from."""
        found = set[str]()
        for path, one in self._by_path.items():
            if one.contains(name) or name == path:
                found |= self._order.get(path, (0, set()))[1]
        return found

    def follow(self) -> None:
        """Expect the live tensors where they are now."""
        self._index = StorageIndex(self.model)

    def moved(self, traced: torch.nn.Module) -> set[str]:
        """Return the live tensors that are not where they were at start-up, by name.

        Rebuilt values that are no parameters or buffers count from the first rebuild in which they
        differed. The caller looks at the parameters and buffers of the `traced` model itself.
        """
        places = self._places.copy()  # the scrubbing thread looks, too, while a rebuild adds some
        found = {path for path, place in places.items() if not place.unchanged()}
        found.update(path for one in self.recomputed for path in one.moved())
        return found if traced is self.model else found.union(self._index.moved(self.model))

    def recomputed_from(self, live_names: AbstractSet[str]) -> Iterator[Recomputed]:
        """Yield what must be recomputed once these live tensors are written, in its order."""
        return (one for one in self.recomputed if one.weights & live_names)

    def computed(self) -> set[str]:
        """Return the paths of the tensors that rebuilt modules get whole when all weights change.

        Others, which are computed in place, might keep some of their elements.
        """
        modules = ((p, one) for p, one in self._by_path.items() if one.module is not None)
        return {f"{path}.{name}" for path, one in modules for name in one.proven}

    def shared(self) -> set[int]:
        """Return the addresses of live tensors that rebuilding uses as they are."""
        return {
            tensor.data_ptr() for one in self._by_path.values() for tensor in one.shared_tensors()
        }

    def pending(self, staged: Sequence[StagedPart]) -> list[str]:
        """Return the modules that must still be rebuilt for a sync, the same on every rank."""
        if not (staged and self._order):
            return []
        sent = [part_totals(part).names for part in staged]
        done = totals(staged).modules
        return [
            path
            for path, (_, names) in self._order.items()
            if path not in done and not all(own.isdisjoint(names) for own in sent)
        ]

    def rebuild_some(self, staged: Sequence[StagedPart]) -> None:
        """Rebuild the next batch of modules, and add them to the totals of the sync.

        All ranks must call it, and if one raises, all do.

        Raises:
            NotUpdatable: a module cannot be rebuilt. Nothing was written.
        """
        batch: list[str] = []
        left = _BATCH
        for path in self.pending(staged):
            if left > 0:
                batch.append(path)
                left -= self._order[path][0]
        if not batch:
            return
        # Every rank must run as many rebuilds.
        checked = set(batch).intersection(*self._ranks.all_gather(self._checkable(batch)))

        found = {}
        for path in batch:
            try:
                found[path] = self._rebuild_in_lockstep(path, staged, path in checked)
            except RebuildError as error:
                raise NotUpdatable(str(error), module=path) from error
        whole = totals(staged)
        # Memory of a device can be missing on one rank: its modules count with their writes alone.
        made = run_on_all_or_none(self._ranks, lambda: _together(found.values()))
        whole.add_modules(found, made)

    def corrupted(self) -> list[str]:
        """Return the checkpoint tensors whose modules are not what processing makes of them.

        Rebuilds every module; all ranks must call it.
        """
        wrong: set[str] = set()
        for path, (_, names) in self._order.items():
            try:
                intact = self._is_intact(path)
            except Exception:
                logger.exception("delta updates: %s cannot be rebuilt", path)
                intact = False
            if not intact:
                wrong |= names
        return sorted(wrong)

    def written(self, staged: Sequence[StagedPart]) -> frozenset[str]:
        """Return the names of what the modules are computed from that a sync changes here."""
        found = set()
        for path, made in totals(staged).modules.items():
            one = self._by_path.get(path)
            if one is not None and made.writes:
                found |= {f"{path}.{name}".lstrip(".") for name, _ in one.weights()}
        return frozenset(found)

    def committed(self, staged: Sequence[StagedPart]) -> dict[str, Mapping[str, str] | None]:
        """Record that a sync was written; return what `restored` takes to go back."""
        before: dict[str, Mapping[str, str] | None] = {}
        for path, made in totals(staged).modules.items():
            one = self._by_path.get(path)
            if one is not None:
                before[path] = self._known.get(path)
                self._known[path] = {p: made.fingerprints[p] for p in one.proven}
        return before

    def restored(self, known: Mapping[str, Mapping[str, str] | None]) -> None:
        """Record that a sync was rolled back; `known` is what `committed` has returned."""
        for path, fingerprints in known.items():
            if fingerprints is None:
                self._known.pop(path, None)
            else:
                self._known[path] = fingerprints

    def forget(self) -> None:
        """Forget what rebuilding gives: something else might have changed the weights."""
        self._known = {}

    def _checkable(self, paths: Sequence[str]) -> list[str]:
        """Return the modules that this rank lacks, or for which it knows what rebuilding gives."""
        return [path for path in paths if path in self._known or path not in self._by_path]

    def _is_intact(self, path: str) -> bool:
        one = self._by_path.get(path)
        if one is None:
            self._lockstep.follow(path, self.model)
            return True
        expected = self._known.get(path, {})
        return self._lockstep.run(path, functools.partial(one.is_intact, expected))

    def _rebuild_in_lockstep(
        self, path: str, staged: Sequence[StagedPart], checks: bool
    ) -> StagedModule:
        """Rebuild one module on the ranks that have it; all ranks must call it.

        Args:
            checks: whether it is first rebuilt from the weights as they are.
        """
        one, what = self._by_path.get(path), f"rebuilding {path}"
        if one is None:
            self._lockstep.follow(path, self.model, what)
            return StagedModule([], {})
        return self._lockstep.run(what, functools.partial(self._rebuild, one, staged, checks))

    def _rebuild(self, one: Rebuild, staged: Sequence[StagedPart], checks: bool) -> StagedModule:
        """Rebuild one module; NotUpdatable says why it cannot be."""
        path = one.path
        changes: dict[str, list[Write]] = {}
        writes = [write for part in staged for param in part.params for write in param.writes]
        for write in writes:
            if write.live in one.names:
                changes.setdefault(one.names[write.live], []).append(write)
        try:
            other = one.rebuild({}).unlike(self._known[path]) if checks else []
            if other:
                raise RebuildError(
                    f"from the weights as they are, processing gives other {', '.join(other)} than "
                    "before; restart the engine"
                )
            rebuilt = one.rebuild(changes)
            lost = sorted(one.proven.keys() - rebuilt.fingerprints.keys())
            if lost:
                raise RebuildError(f"nothing shows what {', '.join(lost)} is now")
        except NotUpdatable:  # of another rank
            raise
        except Exception as error:
            raise NotUpdatable(
                f"{path} cannot be rebuilt with the new weights: {type(error).__name__}: {error}",
                module=path,
            ) from error
        keep = all(write.keep for write in writes)
        for difference in rebuilt.differences:
            if difference.place is not None:
                self._places.setdefault(f"{path}.{difference.path}", difference.place)
        found = [Write(d.elements, d.new, "", keep) for d in rebuilt.differences]
        keep_on_device(found, self._memory)
        read_old(found, self._memory)
        batch_unread(found, self._memory)
        return StagedModule(found, rebuilt.fingerprints)


def _together(modules: Iterable[StagedModule]) -> PartWrites | None:
    writes = [write for one in modules for write in one.writes]
    return PartWrites(writes) if writes else None
