"""This project's two ways to apply, each as a subject.

The whole path of a running engine: what an adapter learns around loading, then `make_receiver` on
every rank, then parts on the wire, staged and committed by the receivers of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import nn

from engine_ext.conformance.sending import send
from engine_ext.conformance.subject import Delta, Rank
from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.conformance.toy_models import ToyModel
from engine_ext.model import Constants, is_constant
from engine_ext.ranks.operations import Operation, decode_answers, encode_request
from engine_ext.settings import Settings
from engine_ext.startup import (
    LoadedModel,
    LoadingTrace,
    Processing,
    Recomputation,
    RepackLearner,
    Reprocessing,
    UnprocessedModules,
    make_unprocessed_model,
)
from engine_ext.sync import Receiver, make_receiver

_UNPROCESSED_BYTES = 1 << 20


class Project:
    """One way to apply, through the receivers of all ranks; parts come in one encoding."""

    def __init__(self, name: Literal["scatter", "masked"], encoding: str = "deltas") -> None:
        self.name: str = name
        self._apply, self._encoding = name, encoding
        self._receivers: list[Receiver] = []

    def serve(self, ranks: Sequence[Rank]) -> None:
        group = Group(len(ranks), timeout_s=10)
        settings = Settings(apply=self._apply, undo_bytes=1 << 24, read_workers=1)
        loaded = [_load(rank, ThreadRanks(group, number)) for number, rank in enumerate(ranks)]
        self._receivers = _everywhere(lambda model: make_receiver(model, settings), loaded)

    def apply(self, deltas: Sequence[Delta]) -> None:
        send(deltas, self.call, encoding=self._encoding)

    def call(self, request: Operation[Any]) -> list[Any]:
        """Return every rank's reply to an operation, or its error."""
        answers = _everywhere(lambda r: r.handle(*encode_request(request)), self._receivers)
        return list(decode_answers(request, answers))


def scatter() -> Project:
    """Direct writes through the certified placement."""
    return Project("scatter")


def masked() -> Project:
    """NaN-masked writes through the model's own loader."""
    return Project("masked")


def _everywhere(do: Callable[[Any], Any], ranks: Sequence[Any]) -> list[Any]:
    """The result of every rank, in rank order; all ranks run at once."""
    if len(ranks) == 1:
        return [do(ranks[0])]
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(do, ranks))


def _load(rank: Rank, place: ThreadRanks) -> LoadedModel:
    """Start one rank's engine, and see what an adapter sees meanwhile."""
    model: Any = rank.model
    constants, states, loading = (
        Constants(model),
        UnprocessedModules(_UNPROCESSED_BYTES),
        LoadingTrace(),
    )
    rank.load()

    def trace(model: nn.Module) -> AbstractSet[str]:
        unprocessed: Any = make_unprocessed_model(model, states.states)
        return loading.trace(unprocessed, unprocessed.load_weights, rank.checkpoint.items)

    # The engine's walk over its modules is preceded by the learner's.
    learner = RepackLearner(type(model), "after_loading", _processings, trace, states.keep)
    learner.learn(model)
    rank.process()
    return LoadedModel(
        model=model,
        load_weights=model.load_weights,
        checkpoint=rank.checkpoint.items,
        reload=model.load_weights,
        ranks=place,
        repacks=learner.repacks,
        refusals=learner.refusals,
        constants=lambda path, tensor: is_constant(path, tensor) or constants(path, tensor),
        recomputations=[Recomputation(("",), model.recompute)] if _recomputes(model) else [],
        loading=loading,
        reprocessing=Reprocessing(
            states=states,
            loader=lambda copy: cast("ToyModel", copy).load_weights,
            context=contextlib.nullcontext,
            probe=_probe,
        ),
    )


def _processings(model: Any) -> Iterator[Processing]:
    """The calls that the engine makes after loading."""
    if type(model).after_loading is ToyModel.after_loading:
        return
    for module in model.processed():
        yield Processing(
            module,
            SimpleNamespace(),
            lambda copy: copy.after_loading(),
            recomputed=_recomputes(module),
        )


def _probe(module: Any) -> torch.Tensor | None:
    return module.compute() if hasattr(module, "compute") else None


def _recomputes(model: nn.Module) -> bool:
    return hasattr(model, "recompute")
