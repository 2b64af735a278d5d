"""The masked applier: what one rank can write, and the writing of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from engine_ext import masked
from engine_ext.certify import summary
from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.errors import NotUpdatable
from engine_ext.placement import Placement, Status
from engine_ext.storage_index import StorageIndex
from engine_ext.tracing import LoadWeights, rehearse
from engine_ext.wire import ParamDelta, Part


class MaskedApplier:
    """Applies parts through the engine's own loader (see `engine_ext.masked`).

    Args:
        model: the live model.
        load_weights: its loader.
        index: its storage index, as of the certification.
        placement: the certified placement of this rank.
        held: checkpoint tensors that some rank of the engine holds.
        chunk_bytes: bytes of full-shape tensors that one call of the loader gets at most.
    """

    name = "masked"

    def __init__(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        index: StorageIndex,
        placement: Placement,
        held: Collection[str],
        chunk_bytes: int,
    ) -> None:
        self._model = model
        self._load_weights = load_weights
        self._index = index
        self._placement = placement
        self._held = frozenset(held)
        self._chunk_bytes = chunk_bytes
        self._rehearsed: list[list[str]] = []

    def check(self, part: Part) -> None:
        """Refuse a part of which some param cannot be written exactly.

        Raises:
            NotUpdatable: names the tensor. Nothing was written.
        """
        for delta in part.deltas:
            self._check_param(delta)

    def _check_param(self, delta: ParamDelta) -> None:
        placed = self._placement.get(delta.name)
        if placed is None:
            raise NotUpdatable(
                f"{delta.name}: the checkpoint this engine was loaded from has no such tensor",
                tensor=delta.name,
            )
        if delta.name not in self._held:
            raise NotUpdatable(
                f"{delta.name}: the engine ignores this tensor; leave it out", tensor=delta.name
            )
        spec = placed.spec
        dtype = NAME_OF_TORCH[spec.dtype]
        if (delta.shape, delta.dtype) != (spec.shape, dtype):
            raise NotUpdatable(
                f"{delta.name}: the checkpoint's is {dtype} {list(spec.shape)}, the delta's "
                f"{delta.dtype} {list(delta.shape)}",
                tensor=delta.name,
            )
        if placed.status is Status.NOT_ON_RANK:
            return
        reason = masked.refusal(delta, placed)
        if reason is not None:
            raise NotUpdatable(
                f"{delta.name}: this engine cannot update it exactly: {reason}",
                tensor=delta.name,
                reason=reason,
            )

    def check_sync(self, parts: list[Part], *, full: bool) -> None:
        """Refuse a sync whose parts overlap, or a ``full`` one that leaves tensors out.

        Also refuses when the engine has moved a weight since start-up, and when the loader would
        do something else with just these tensors than it did with all of them.

        Raises:
            NotUpdatable: names the tensors. Nothing was written.
        """
        moved = self._index.moved(self._model)
        if moved:
            raise NotUpdatable(f"the engine moved these after start-up: {moved}", tensors=moved)
        by_name: dict[str, list[ParamDelta]] = defaultdict(list)
        for part in parts:
            for delta in part.deltas:
                by_name[delta.name].append(delta)
        for name, deltas in by_name.items():
            if len(deltas) > 1 and _overlap(deltas):
                raise NotUpdatable(f"{name}: two parts send the same elements", tensor=name)
        if full:
            self._check_covers(by_name)
        self._rehearse(self._mine(parts))

    def _check_covers(self, by_name: dict[str, list[ParamDelta]]) -> None:
        sparse = sorted(n for n, ds in by_name.items() if any(d.indices is not None for d in ds))
        if sparse:
            raise NotUpdatable(
                f"a full sync sends every element, these are sparse: {sparse}", tensors=sparse
            )
        missing = sorted(self._held - by_name.keys())
        if missing:
            raise NotUpdatable(
                f"a full sync must cover every tensor; {len(missing)} are missing: {missing}",
                tensors=missing,
            )

    def commit(self, parts: list[Part], *, full: bool) -> None:
        """Write all params that have elements on this rank, and read them back.

        Raises:
            Exception: the loader's own, or RuntimeError if an element does not hold its new
                bits afterwards. Some elements may be written then.
        """
        mine = self._mine(parts)
        masked.apply_masked(self._load_weights, self._index, mine, self._chunk_bytes)
        for delta in mine:
            if not masked.verify(delta, self._placement[delta.name]):
                raise RuntimeError(f"{delta.name} does not hold its new bits after the write")

    def _mine(self, parts: list[Part]) -> list[ParamDelta]:
        """What the loader of this rank is given: each tensor of which some elements change here."""
        deltas = [d for part in parts for d in part.deltas if d.nnz]
        return masked.merge(d for d in deltas if self._placement[d.name].segments)

    def _rehearse(self, deltas: list[ParamDelta]) -> None:
        calls = [[d.name for d in c] for c in masked.chunks(deltas, self._chunk_bytes)]
        if calls == self._rehearsed:
            return
        for names in calls:
            reasons = rehearse(self._model, self._load_weights, names, self._placement, self._index)
            if reasons:
                raise NotUpdatable(
                    f"this engine cannot update these exactly: {reasons}",
                    tensors=sorted(reasons),
                    reasons=reasons,
                )
        self._rehearsed = calls

    def describe(self) -> dict[str, Any]:
        """Apply mode and certification summary, as JSON."""
        return {
            "apply": self.name,
            "certification": summary(self._placement),
            "uncertified": {
                name: placed.reason
                for name, placed in self._placement.items()
                if placed.status is Status.UNCERTIFIED
            },
        }


def _overlap(deltas: list[ParamDelta]) -> bool:
    """Whether some element of a tensor is sent more than once."""
    if any(delta.indices is None for delta in deltas):
        return True
    indices = np.concatenate([d.indices for d in deltas if d.indices is not None])
    return len(np.unique(indices)) != len(indices)
