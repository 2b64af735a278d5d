"""Judge syncs of one model as an installed engine loads it.

The engine is started on a base checkpoint, gets a sync, and is started anew on the target, whose
memory is the expected one. It then holds the base of the next sync, so that one engine runs at a
time, and each sync finds memory that was freshly loaded.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import save_file

from engine_ext.conformance.judge import EXACT, REFUSED, TORN, WRONG
from engine_ext.conformance.memory import different
from engine_ext.conformance.sending import Refused, send
from engine_ext.conformance.syncs import Sync, bits, change, deltas_of, syncs_for
from engine_ext.errors import DeltaError
from engine_ext.files import read_checkpoint
from engine_ext.ranks.operations import GetPlan, Operation

Hashes = dict[str, str]
Weights = dict[str, torch.Tensor]

KINDS: Final = (
    *("sparse 0.5 %", "sparse 40 %", "dense", "one dense"),
    *("to NaN", "zeros and NaNs in the base", "alone"),
)
"""The kinds of syncs, by name; "alone" are those of single tensors."""

NOT_RUN: Final = "not run"
"""The outcome of a sync that was not sent, or not compared; the detail says why."""

_NAMES: Final = 6  # in a detail
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_REFUSED: Final = "uncertified"
_START: Final = "start with delta updates"


class Engine(Protocol):
    """A loaded engine."""

    def call(self, request: Operation[Any]) -> Sequence[Any]:
        """Return every rank's reply to an operation, or its error, in rank order."""

    def hashes(self) -> Hashes:
        """Return a hash of every tensor in memory, by rank and path."""

    def close(self) -> None:
        """End it."""


Start = Callable[[Path, bool], Engine]
"""Load a checkpoint's folder with the engine; True: the engine can take syncs."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One sync of the model.

    Attributes:
        tensors: how many were sent.
        differs: of an outcome that is torn or wrong: the live tensors that are not as they should
            be, each with the checkpoint tensors that are loaded into it.
    """

    sync: str
    outcome: str
    tensors: int
    detail: str = ""
    differs: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all syncs.

    Attributes:
        plan: a row per checkpoint tensor, see `engine_ext.placement.plan.Plan.table`.
        ranks: how many the engine has.
        unsteady: live tensors that differ between two loads of the same checkpoint, and are not
            judged.
    """

    plan: list[dict[str, Any]]
    ranks: int
    unsteady: list[str]
    judged: list[Judged]

    @property
    def violated(self) -> bool:
        """Whether some sync was torn or wrong."""
        return any(one.outcome in (TORN, WRONG) for one in self.judged)

    @property
    def is_empty(self) -> bool:
        """Whether no sync was judged, but at most the start."""
        return all(one.outcome == NOT_RUN for one in self.judged if one.sync != _START)


def judge_model(
    model: Path,
    start: Start,
    work: Path,
    *,
    merge: Callable[[Sequence[Any]], list[dict[str, Any]]],
    only: Sequence[str] = (),
    plain: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Judge all kinds of syncs of a model; see the module.

    Args:
        model: its folder, with weights. It is not changed.
        work: a new or empty folder, for the target checkpoints.
        merge: makes one plan of those of all ranks.
        only: some of `KINDS`; empty for all.
        plain: whether an engine that takes no syncs has the same memory at start.
        say: called with what is being done.

    Raises:
        Exception: the engine could not load a checkpoint, or has ended.
    """
    return _Judge(model, start, work, say).judge(merge, only, plain=plain)


class _Judge:
    def __init__(self, model: Path, start: Start, work: Path, say: Callable[[str], None]) -> None:
        self._folder, self._start, self._work, self._say = model, start, work, say
        self._weights: Weights = {n: t.clone() for n, t in read_checkpoint(model)}
        self._judged: list[Judged] = []
        self._unsteady: set[str] = set()
        self._live: dict[str, list[str]] = {}
        self._targets = 0

    def judge(
        self,
        merge: Callable[[Sequence[Any]], list[dict[str, Any]]],
        only: Sequence[str],
        *,
        plain: bool,
    ) -> Report:
        self._say("loading the base checkpoint, for comparison")
        first = self._loaded(syncs=not plain)
        self._say("loading it with delta updates")
        engine = self._start(self._folder, True)
        try:
            ranks = _plans(engine)
            plan = merge(ranks)
            self._live = _live_names(plan)
            before = engine.hashes()
            found = different(first, before)
            if found and plain:
                self._say("loading the base checkpoint again: something differs")
                engine.close()
                self._unsteady = set(different(first, self._loaded(syncs=False)))
                engine = self._start(self._folder, True)
            else:
                self._unsteady = set(found)
            wrong = self._different(first, before)
            start_outcome = WRONG if wrong else EXACT
            self._add(_START, start_outcome, 0, "", wrong)
            made = {_kind(batch[0]): batch for batch in batches(plan, self._weights)}
            for kind, batch in made.items():
                if not only or kind in only:
                    engine = self._batch(engine, batch, plan)
            for kind in only or KINDS:
                if kind not in made:
                    self._not_run(kind, _why_not(made))
        finally:
            engine.close()
        return Report(plan, len(ranks), sorted(self._unsteady), self._judged)

    def _loaded(self, *, syncs: bool) -> Hashes:
        engine = self._start(self._folder, syncs)
        try:
            return engine.hashes()
        finally:
            engine.close()

    def _batch(self, engine: Engine, batch: Sequence[Sync], plan: Sequence[Any]) -> Engine:
        """Send some syncs, and load what they lead to; returns the engine that did."""
        before, current, version = engine.hashes(), self._weights, 0
        sent: list[Sync] = []
        torn: Mapping[str, list[str]] = {}
        for number, sync in enumerate(batch, 1):
            self._say(f"sending: {sync.name}")
            target = changed(current, sync, plan)
            sync = _without_unchanged(sync, current, target)
            if not sync.tensors:
                self._not_run(sync.name, "it would change no element of these weights")
                continue
            try:
                deltas = deltas_of(sync, current, target)
                send(deltas, engine.call, version=version + number, base_version=version)
            except Refused as error:
                torn = self._different(engine.hashes(), before)
                outcome = TORN if torn else REFUSED
                self._add(sync.name, outcome, len(sync.tensors), str(error), torn)
                if torn:
                    for one in batch[number:]:
                        self._not_run(one.name, f"{sync.name} was torn before it")
                    break
            else:
                version, current, before = version + number, target, engine.hashes()
                sent.append(sync)
        if not sent and not torn:
            return engine
        engine.close()
        if sent:
            self._folder, self._weights = self._written(current), current
        self._say("loading the target checkpoint")
        engine = self._start(self._folder, True)
        if sent and not torn:
            wrong = self._different(before, engine.hashes())
            for sync in sent:
                own = {live: names for live, names in wrong.items() if _has(names, sync, sent)}
                self._add(sync.name, WRONG if own else EXACT, len(sync.tensors), "", own)
        for sync in sent if torn else ():
            self._not_run(sync.name, "not compared: a sync after it was torn")
        return engine

    def _written(self, weights: Weights) -> Path:
        """Write a checkpoint next to the files of the one before, which is removed."""
        before = self._folder
        self._targets += 1
        folder = self._work / f"target{self._targets}"
        folder.mkdir(parents=True)
        for file in before.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                (folder / file.name).write_bytes(file.read_bytes())
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
        if before.parent == self._work:
            for file in before.iterdir():
                file.unlink()
            before.rmdir()
        return folder

    def _different(self, one: Hashes, other: Hashes) -> dict[str, list[str]]:
        names = [name for name in different(one, other) if name not in self._unsteady]
        return {name: self._live.get(name.partition(": ")[2], []) for name in names}

    def _not_run(self, sync: str, why: str) -> None:
        self._add(sync, NOT_RUN, 0, why, {})

    def _add(
        self, sync: str, outcome: str, tensors: int, text: str, found: Mapping[str, list[str]]
    ) -> None:
        if found:
            text = f"{_cut(list(found))}{f': {text}' if text else ''}"
        self._judged.append(Judged(sync, outcome, tensors, text, dict(found)))


def batches(plan: Sequence[Mapping[str, Any]], weights: Weights) -> list[list[Sync]]:
    """Return the syncs of a model, in the order in which they are sent.

    Every tensor of floating-point numbers that the plan does not refuse changes. Integers keep
    their values, as not every value of theirs can be loaded. The syncs of single tensors, one of
    each kind and one of each kind that is refused, are one batch: together they lead to a target.
    """
    status = {row["name"]: row["status"] for row in plan if row["name"] in weights}
    tied = {row["name"] for row in plan if row.get("tied_to")}
    floating = [n for n in status if weights[n].is_floating_point() and weights[n].numel()]
    names = tuple(n for n in floating if status[n] != _REFUSED)
    alone = _one_of_each(n for n in names if n not in tied)
    refused = _one_of_each(n for n in floating if status[n] == _REFUSED)
    found = syncs_for(names, alone, floating=True) if names else []
    single = [sync for sync in found if sync.group == "alone"]
    single += [Sync(f"only {name}", "alone", (name,)) for name in refused]
    several = [sync for sync in found if sync.group != "alone"]
    # The NaNs that one sync leaves become numbers again by the last one.
    several.sort(key=lambda sync: (sync.odd_base, sync.nan))
    return [*([sync] for sync in several), *([single] if single else [])]


def _kind(sync: Sync) -> str:
    return "alone" if sync.group == "alone" else sync.name


def _why_not(made: Iterable[str]) -> str:
    """Return why a kind of sync is not among those that `batches` has made."""
    if not {*made} - {"alone"}:
        return "no tensor of floating-point numbers can be updated"
    return "it needs two tensors that can be updated"


def changed(weights: Weights, sync: Sync, plan: Sequence[Mapping[str, Any]]) -> Weights:
    """Return other weights: what the sync leads to. Tensors that share memory stay equal."""
    target = dict(weights)
    for name in sync.tensors:
        target[name] = weights[name].clone().contiguous()
        change(target[name], sync, zlib.crc32(f"{sync.name} {name}".encode()))
    for row in plan:
        name, other = row["name"], row.get("tied_to")
        if other in sync.tensors and name in sync.tensors:
            target[name] = target[other].clone()
    return target


def _without_unchanged(sync: Sync, base: Weights, target: Weights) -> Sync:
    def is_sent(name: str) -> bool:
        return name in sync.dense or not torch.equal(bits(base[name]), bits(target[name]))

    return replace(sync, tensors=tuple(filter(is_sent, sync.tensors)))


def _plans(engine: Engine) -> list[Any]:
    plans = []
    for reply in engine.call(GetPlan()):
        if isinstance(reply, DeltaError):
            raise reply
        if reply.tensors is None:
            raise RuntimeError("the engine has loaded no checkpoint, so there is nothing to judge")
        plans.append(reply.tensors)
    return plans


def _live_names(plan: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the checkpoint tensors of each live tensor."""
    found: dict[str, list[str]] = {}
    for row in plan:
        for live in (*row["live"], *row["recomputed"]):
            found.setdefault(live, []).append(row["name"])
    return found


def _one_of_each(names: Iterable[str]) -> list[str]:
    """Return the first of the names that differ in numbers only, as layers do."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(_NUMBER.sub("*", name), name)
    return list(found.values())


def _has(names: Sequence[str], sync: Sync, sent: Sequence[Sync]) -> bool:
    """Whether a difference is a sync's: of its tensors, or of none of those that were sent."""
    known = {name for one in sent for name in one.tensors}
    return not known.intersection(names) or bool(set(sync.tensors).intersection(names))


def _cut(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
