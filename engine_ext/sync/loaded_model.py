"""What an adapter knows about the model that its engine has loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_ext.derived import Recomputation
from engine_ext.model import Known, is_constant
from engine_ext.placement import Repack
from engine_ext.ranks import Ranks
from engine_ext.rebuild import LoadingStates, Probe
from engine_ext.remote_parts import Locate
from engine_ext.sync.initial_sync import CheckpointReader, Reload
from engine_ext.tracing import LoadingTrace, LoadWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilding:
    """How the engine's post-load processing is repeated on one rank.

    Attributes:
        states: the modules that need it, as they were before.
        loader: returns the loader of a twin of the model (see `engine_ext.rebuild.make_twin`).
        context: what the engine's processing runs in.
        probe: see `engine_ext.rebuild.prove`.
    """

    states: LoadingStates
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
        refuse_while: see `trace_placement`.
        loading: what the loader did before post-load processing; None if nothing is processed.
        rebuilding: None if the engine's processing cannot be repeated.
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
    ranks: Ranks
    repacks: Mapping[str, Repack] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    learned: bool = True
    constants: Known = is_constant
    recomputations: Sequence[Recomputation] = ()
    refuse_while: Callable[[torch.nn.Module], str | None] | None = None
    loading: LoadingTrace | None = None
    rebuilding: Rebuilding | None = None
    captures: bool = True
    locate: Locate | None = None
    load_format: str = "auto"
