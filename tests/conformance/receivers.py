"""This project's two ways to apply, each as a subject.

The whole path of a running engine: what an adapter learns around loading, then `make_receiver` on
every rank, then parts on the wire, staged and committed by the receivers of all ranks.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import torch
from torch import nn

from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype
from engine_ext.format import ParamDelta, PartId, encode_part
from engine_ext.model.constants import Constants, is_constant
from engine_ext.settings import Settings
from engine_ext.startup import (
    LoadedModel,
    LoadingTrace,
    Processing,
    RepackLearner,
    Reprocessing,
    UnprocessedModules,
    make_unprocessed_model,
)
from engine_ext.startup.derived.recompute import Recomputation
from engine_ext.sync import make_receiver
from engine_ext.sync.receiver import Receiver
from tests.conformance.subject import Delta, Rank
from tests.conformance.syncs import bits
from tests.support.thread_group import Group, ThreadRanks
from tests.support.toy_models import ToyModel
from tests.support.verified_file import identity_of, verified_file

_SYNC_ID = "conformance"
_UNPROCESSED_BYTES = 1 << 20


class Refused(Exception):
    """A receiver's answer in place of a write."""


class Project:
    """One way to apply, through the receivers of all ranks; parts come in one encoding."""

    def __init__(self, name: Literal["scatter", "masked"], encoding: str = "deltas") -> None:
        self.name, self._encoding = name, encoding
        self._receivers: list[Receiver] = []

    def serve(self, ranks: Sequence[Rank]) -> None:
        group = Group(len(ranks), timeout_s=10)
        settings = Settings(apply=self.name, undo_bytes=1 << 24, read_workers=1)
        loaded = [_load(rank, ThreadRanks(group, number)) for number, rank in enumerate(ranks)]
        self._receivers = _everywhere(lambda model: make_receiver(model, settings), loaded)

    def apply(self, deltas: Sequence[Delta]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            bodies = _bodies(deltas, self._encoding)
            for number, body in enumerate(bodies):
                path = Path(folder, f"{number}.part")
                path.write_bytes(verified_file(body)[1])
                self._stage(_part_id(body, number, len(bodies)), path)
            self._prepare(_part_id(bodies[-1], len(bodies) - 1, len(bodies)))
            self._call("commit", version=1, sync_id=_SYNC_ID)

    def _stage(self, part: PartId, path: Path) -> None:
        sent = msgspec.to_builtins(part)
        self._call("begin", part=sent, path=str(path), now=0.0)
        while not all(answer["done"] for answer in self._call("poll", part=sent)):
            time.sleep(0.0005)
        self._call("prepare", part=sent, keep=True)

    def _prepare(self, part: PartId) -> None:
        sent = msgspec.to_builtins(part)
        while not all(answer["done"] for answer in self._call("prepare", part=sent)):
            pass

    def _call(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        """Every rank's answer.

        Raises:
            Refused: some rank answered with an error.
        """
        answers = _everywhere(lambda r: r.handle(operation, arguments), self._receivers)
        for answer in answers:
            if "error" in answer:
                raise Refused(f"{answer['error']['type']}: {answer['error']['message']}")
        return [answer["ok"] for answer in answers]


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

    def trace(model: nn.Module) -> None:
        unprocessed: Any = make_unprocessed_model(model, states.states)
        loading.trace(unprocessed, unprocessed.load_weights, rank.checkpoint.items)

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


def _bodies(deltas: Sequence[Delta], encoding: str) -> list[bytes]:
    """The parts of one sync, each of one dtype; an empty one where nothing is sent."""
    params = [_param(delta) for delta in deltas]
    dtypes = sorted({param.dtype for param in params}) or [""]
    return [
        encode_part(
            [param for param in params if param.dtype == dtype],
            encoding=encoding,
            current_version=1,
            base_version=0,
            sync_id=_SYNC_ID,
            part=number,
            num_parts=len(dtypes),
        )
        for number, dtype in enumerate(dtypes)
    ]


def _param(delta: Delta) -> ParamDelta:
    dtype = NAME_OF_TORCH[delta.dtype]
    values = bits(delta.values).numpy().view(bits_dtype(dtype))
    indices = None if delta.indices is None else delta.indices.numpy()
    return ParamDelta(delta.name, dtype, delta.shape, indices, values)


def _part_id(body: bytes, number: int, of: int) -> PartId:
    return PartId(
        version=1,
        base_version=0,
        identity=identity_of(body),
        sync_id=_SYNC_ID,
        part=number,
        num_parts=of,
    )
