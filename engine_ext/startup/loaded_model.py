"""What start-up begins with, and what tracing makes of it.

An adapter describes the model that its engine has loaded (`LoadedModel`). Everything after that is
the same for every engine; see `engine_ext.startup.order`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_ext.model import Known, StorageIndex, is_constant
from engine_ext.placement import Certified, Placement, Repack, Segment, TensorSpec
from engine_ext.ranks import RankGroup
from engine_ext.remote_parts import Locate
from engine_ext.startup.derived import Recomputation, Recomputed
from engine_ext.startup.recomputed import Probe, Rebuild, UnprocessedModules
from engine_ext.startup.trace import LoaderDryRun, LoadingTrace, LoadWeights

Reload = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
CheckpointReader = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprocessing:
    """How the engine's post-load processing is repeated on one rank.

    Attributes:
        states: the modules that need it, as they were before.
        loader: returns the loader of an unprocessed copy, see `make_unprocessed_model`.
        context: what the engine's processing runs in.
        probe: tries a module out, see `Probe`.
    """

    states: UnprocessedModules
    loader: Callable[[torch.nn.Module], LoadWeights]
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    probe: Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What an adapter knows about the model that one rank has loaded.

    Attributes:
        model: in serving state.
        load_weights: its own loader; takes (name, tensor) pairs.
        checkpoint: reads the loaded checkpoint again with each call: (name, tensor) pairs on the
            CPU, in the engine's order. None if the weights are not a checkpoint's.
        reload: the engine's own function that loads other weights into the running model.
        repacks: moves of live tensors after loading, by the live tensor's name.
        refusals: live tensors whose moves cannot be followed, with the reason.
        learned: whether `repacks` and `refusals` include everything that the engine does to
            weights after loading.
        constants: returns whether a tensor that is not a weight is known not to be computed from
            weights.
        refuse_while: see `LoaderDryRun`.
        loading: what the loader did before post-load processing; None if nothing is processed.
        reprocessing: None if the engine's processing cannot be repeated.
        captures: whether the engine might have captured graphs, which keep addresses of weights on
            devices other than the CPU.
        locate: finds parts on this rank's host, see `engine_ext.remote_parts`; None if the engine
            has one host.
        load_format: the engine's name of the way in which the weights were loaded.
    """

    model: torch.nn.Module
    load_weights: LoadWeights
    checkpoint: CheckpointReader | None
    reload: Reload
    ranks: RankGroup
    repacks: Mapping[str, Repack] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    learned: bool = True
    constants: Known = is_constant
    recomputations: Sequence[Recomputation] = ()
    refuse_while: Callable[[torch.nn.Module], str | None] | None = None
    loading: LoadingTrace | None = None
    reprocessing: Reprocessing | None = None
    captures: bool = True
    locate: Locate | None = None
    load_format: str = "auto"


@dataclass(frozen=True, slots=True)
class Traced:
    """The result of tracing the tensors of a checkpoint through the model's loader.

    Attributes:
        dry_run: of the model's loader, or of that of the unprocessed model.
        placement: not certified by the tracing.
        others: live boxes that the loader fills with something else (padding).
        recomputed: derived tensors that are proven to be recomputed correctly.
        rebuilds: modules that are computed from what the loader writes.
        live: index of the live model.
        certified: the digests that the certification gave.
        dropped: other names of tied tensors that the loader is proven to drop.
        tied: the checkpoint's tensors that the loader drops, each with the one that it is tied to.
    """

    dry_run: LoaderDryRun
    placement: Placement
    others: list[Segment]
    live: StorageIndex
    recomputed: list[Recomputed] = field(default_factory=list)
    rebuilds: list[Rebuild] = field(default_factory=list)
    certified: Certified = field(default_factory=dict)
    dropped: dict[str, TensorSpec] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
