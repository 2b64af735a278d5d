"""Serve models of `tests.support.toy_quantised` with rebuilds, as an adapter does.

`Serving` starts the ranks of an engine (learn, keep, load, process, make the receivers) and
compares what they serve with models that were freshly loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.format import ParamDelta
from engine_ext.model.constants import Constants, is_constant
from engine_ext.model.module_walk import reachable_tensors
from engine_ext.settings import Settings
from engine_ext.startup import (
    LoadedModel,
    LoadingTrace,
    Recomputation,
    Reprocessing,
    UnprocessedModules,
    make_unprocessed_model,
)
from engine_ext.startup.permuted.learner import Processing, RepackLearner
from engine_ext.sync import make_receiver
from engine_ext.sync.delta_applier import DeltaApplier
from tests.support.rank_engine import Engine, part_id
from tests.support.served_models import bits, delta_between, dense_delta, one_part, random_tensor
from tests.support.toy_quantised import IN, Layer, Method, Model

UNPROCESSED_BYTES = 1 << 20


def processing(module: Any) -> Processing:
    return Processing(
        module,
        module.quant_method,
        lambda copy: copy.quant_method.process_weights_after_loading(copy),
    )


def walk(model: nn.Module, *args: Any) -> Iterator[Processing]:
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), Method):
            yield processing(module)


def process(model: Model) -> None:
    """The engine's post-load processing."""
    for module in list(model.modules()):
        method = getattr(module, "quant_method", None)
        if isinstance(method, Method):
            method.process_weights_after_loading(module)
    model.after_processing()


def copied(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in checkpoint.items():
        yield name, tensor.clone()


def loaded(model: type[Model], checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> Model:
    """A model as the engine starts it without delta updates."""
    fresh = model(rank, ranks)
    with torch.no_grad():
        fresh.load_weights(copied(checkpoint))
        process(fresh)
    return fresh


def probe(module: nn.Module) -> torch.Tensor | None:
    """A layer's outputs for random rows; None for other modules."""
    if not isinstance(module, Layer) or module.quant_method is None:
        return None
    rows = torch.randn(3, IN, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    return module.quant_method.apply(module, rows)


def served(model: nn.Module) -> dict[str, Any]:
    """All that is served: the bits of every tensor, numbers, and what the layers compute."""
    found: dict[str, Any] = {}
    for path, _, name, tensor in reachable_tensors(model):
        key = f"{path}.{name}"
        found[key] = (tuple(tensor.shape), tensor.stride(), tensor.dtype, bits(tensor).tobytes())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, float):
                found[f"{path}.{name}"] = value
        out = probe(module)
        if out is not None:
            found[f"{path}()"] = bits(out).tobytes()
    return found


class Serving:
    """The ranks of an engine that serves a model, and the version it is at.

    Args:
        context: of `Reprocessing`.
        recomputations: of `LoadedModel`, by model.
        dummy: load random weights in place of the checkpoint.
    """

    def __init__(
        self,
        model: type[Model],
        folder: Path,
        *,
        ranks: int = 1,
        context: Callable[[], Any] = contextlib.nullcontext,
        checkpoint: Checkpoint | None = None,
        shadow_bytes: int = UNPROCESSED_BYTES,
        dummy: bool = False,
        recomputations: Callable[[Any], Sequence[Recomputation]] = lambda model: (),
        **settings: Any,
    ) -> None:
        self.kind, self.size, self.dummy = model, ranks, dummy
        self._recomputations = recomputations
        self.base = model.checkpoint() if checkpoint is None else checkpoint
        self.version = 0
        self.current = dict(self.base)
        group = Group(ranks)
        self.states = [UnprocessedModules(shadow_bytes, moved_too=dummy) for _ in range(ranks)]
        loads = [self._load(rank, context, ThreadRanks(group, rank)) for rank in range(ranks)]
        self.models: list[Any] = [one.model for one in loads]
        self.engine = Engine([], folder)
        chosen = Settings(**{"undo_bytes": 1 << 20, "read_workers": 1, **settings})
        with ThreadPoolExecutor(ranks) as threads:
            receivers = threads.map(lambda one: make_receiver(one, chosen), loads)
            self.engine.receivers = list(receivers)

    @torch.no_grad()
    def _load(self, rank: int, context: Callable[[], Any], place: ThreadRanks) -> LoadedModel:
        model, states = self.kind(rank, self.size), self.states[rank]
        constants, loading = Constants(model), LoadingTrace()
        owner: Any = ModuleType("engine")
        owner.process = process

        def checkpoint() -> Iterable[tuple[str, torch.Tensor]]:
            return copied(self.base)

        def trace(model: nn.Module) -> AbstractSet[str]:
            unprocessed: Any = make_unprocessed_model(model, states.states)
            reader = None if self.dummy else checkpoint
            return loading.trace(unprocessed, unprocessed.load_weights, reader)

        if self.dummy:
            for seed, (name, one) in enumerate(model.named_parameters(), 99):
                if name not in self.kind.constants:
                    one.data.copy_(random_tensor(one.shape, one.dtype, seed))
        else:
            model.load_weights(checkpoint())
        learner = RepackLearner(
            owner, "process", walk, trace, states.keep, keep_moved=states.moved_too
        )
        with learner:
            owner.process(model)
        return LoadedModel(
            model=model,
            load_weights=model.load_weights,
            checkpoint=None if self.dummy else checkpoint,
            reload=model.load_weights,
            ranks=place,
            repacks=learner.repacks,
            refusals={**learner.refusals, **states.refusals(model)},
            learned=learner.complete,
            constants=lambda path, tensor: is_constant(path, tensor) or constants(path, tensor),
            recomputations=self._recomputations(model),
            loading=loading,
            captures=False,
            reprocessing=Reprocessing(
                states=states,
                loader=lambda copy: cast("Model", copy).load_weights,
                context=context,
                probe=probe,
            ),
        )

    def applier(self, rank: int = 0) -> DeltaApplier:
        found = self.engine.receivers[rank]._applier
        assert isinstance(found, DeltaApplier)
        return found

    def statuses(self, rank: int = 0) -> dict[str, str]:
        """The status of every checkpoint tensor."""
        return {n: p.status.value for n, p in self.applier(rank).plan.placement.items()}

    def reasons(self, rank: int = 0) -> dict[str, str]:
        """Why tensors are refused."""
        return {n: p.reason for n, p in self.applier(rank).plan.placement.items() if p.reason}

    def served(self) -> list[dict[str, Any]]:
        return [served(model) for model in self.models]

    # Steps of a sync

    def body(self, target: Checkpoint, *, full: bool = False, dense: bool = False) -> bytes:
        """One part that leads from the current checkpoint to another one."""
        deltas: list[ParamDelta] = []
        for name, new in target.items():
            if full or dense:
                deltas.append(dense_delta(name, new))
            else:
                deltas.append(delta_between(name, self.current[name], new))
        more: dict[str, Any] = {"full": True, "base_version": None} if full else {}
        return one_part(deltas, **{"current_version": self.version + 1, **more})

    def stage(self, body: bytes) -> list[dict[str, Any]]:
        """Stage and prepare as the HTTP side does, and drop what is refused."""
        answers = self.engine.stage(part_id(body), body)
        if any("error" in answer for answer in answers):
            self.engine.call("abort")
        return answers

    def sync(self, target: Checkpoint, **options: Any) -> list[dict[str, Any]]:
        """Send a sync; the answers to the commit, or those that refuse it."""
        body = self.body(target, **options)
        answers = self.stage(body)
        if any("error" in answer for answer in answers):
            return answers
        answers = self.engine.commit(part_id(body))
        if all("ok" in answer for answer in answers):
            self.version, self.current = self.version + 1, self.current | target
        return answers

    def rollback(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """Roll back to a version that had this checkpoint."""
        answers = self.engine.call("rollback")
        if all("ok" in answer for answer in answers):
            self.version, self.current = self.version - 1, checkpoint
        return answers

    def assert_fresh(self) -> None:
        """Every rank serves what an engine would that has loaded the current checkpoint.

        The digest that is tracked is that of a scan.
        """
        for rank, found in enumerate(self.served()):
            expected = served(loaded(self.kind, self.current, rank, self.size))
            assert found.keys() == expected.keys()
            wrong = [name for name, value in expected.items() if found[name] != value]
            assert not wrong, f"rank {rank} serves others: {wrong}"
        self.assert_digests()

    def assert_digests(self) -> None:
        """The digests that each rank tracks are those of its memory."""
        scans = self.engine.call("digest", scan=True)
        for answer in scans:
            assert answer["ok"]["tensors"] == answer["ok"]["tracked"]


def refusal(answers: Sequence[dict[str, Any]]) -> str:
    """The first message; every rank's error says that the engine is unchanged."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert errors, answers
    assert all(error["engine_state"] == "unchanged" for error in errors), errors
    return str(errors[0]["message"])
