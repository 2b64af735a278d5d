"""An engine that loads a target and a draft model, watched; the engine is a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.adapters.observer import ModelLoadObserver, checkpoints, observations
from engine_ext.adapters.target_and_draft import ModelRole
from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.startup import (
    BeforeProcessing,
    CheckpointReader,
    LoadingTrace,
    LoadWeights,
    RepackLearner,
    UnprocessedModules,
)
from tests.support.quantised_engine import copied, process, walk
from tests.support.toy_quantised import Int8, Layer, Model, Transpose, linear_shapes

TARGET = ModelRole("target", "", own=True)
DRAFT = ModelRole("draft", "draft.", own=True)
LIMIT = 1 << 20


class Mixed(Model):
    """A layer whose elements are moved by processing, and one that is computed."""

    shapes: ClassVar = linear_shapes("moved", "int8")

    def build(self, rank: int, ranks: int) -> None:
        self.moved, self.int8 = Layer(Transpose()), Layer(Int8())
        self.register_buffer("steps", torch.arange(4.0), persistent=False)


class ToyEngine:
    """Constructs, loads and processes a model; an `EngineLoad` as well.

    Attributes:
        happened: in order.
        checkpoint: None if there is none.
        refuses: why the loader would not simply load.
        role: the model's place in the receiver's model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None = None,
        refuses: str | None = None,
        role: ModelRole = TARGET,
    ) -> None:
        self.role = role
        self.happened: list[str] = []
        self.checkpoint, self.refuses = checkpoint, refuses
        self.module: Any = ModuleType("engine")
        vars(self.module).update(make=Mixed, process=process)
        self.functions = (Mixed, process)

    @torch.no_grad()
    def load(self) -> Mixed:
        model: Mixed = self.module.make()
        if self.checkpoint is not None:
            model.load_weights(copied(self.checkpoint))
        self.module.process(model)
        return model

    @contextlib.contextmanager
    def constants_kept(self) -> Iterator[None]:
        self.happened.append("constants kept")
        try:
            yield
        finally:
            self.happened.append("constants left")

    def learner(self, before: BeforeProcessing, states: UnprocessedModules) -> RepackLearner:
        return RepackLearner(self.module, "process", walk, before, states.keep)

    def constructor(self) -> tuple[Any, str]:
        return self.module, "make"

    def check(self, model: nn.Module) -> None:
        self.happened.append("checked")

    def reader(self, model: nn.Module) -> CheckpointReader | None:
        self.happened.append("read")
        return None if self.checkpoint is None else lambda: copied(self.checkpoint or {})

    def load_function(self, model: Any) -> LoadWeights:
        self.happened.append("asked for the loader")
        found: LoadWeights = model.load_weights
        return found

    def refuse_while(self, model: nn.Module) -> str | None:
        return self.refuses


class Rank:
    """The models that a rank loads, one after the other."""

    def __init__(self, *engines: ToyEngine) -> None:
        self.loading, self.states = LoadingTrace(), UnprocessedModules(LIMIT)
        roles = (TARGET, DRAFT) if len(engines) > 1 else (ModelRole("", "", own=True),)
        for engine, role in zip(engines, roles, strict=True):
            engine.role = role
        self.observers = [ModelLoadObserver(one, self.loading, self.states) for one in engines]
        self.models = []
        for observer, engine in zip(self.observers, engines, strict=True):
            with observer:
                self.models.append(engine.load())


def with_checkpoint(**options: Any) -> ToyEngine:
    return ToyEngine(Mixed.checkpoint(), **options)


def test_loader_is_traced_before_processing() -> None:
    rank = Rank(with_checkpoint())
    assert rank.observers[0].model is rank.models[0]
    specs = rank.loading.specs
    assert specs is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in Mixed.checkpoint().items()}
    assert {spec.name: spec.shape for spec in specs} == shapes
    [model] = rank.models
    kept = [(state.module, state.moves) for state in rank.states.states]
    assert kept == [(model.moved, True), (model.int8, False)]


def test_models_have_their_places_in_the_receivers() -> None:
    rank = Rank(with_checkpoint(), with_checkpoint())
    assert {spec.name for spec in rank.loading.specs or ()} == {
        f"{prefix}{name}" for prefix in ("", "draft.") for name in Mixed.checkpoint()
    }
    found = observations(rank.observers, [])
    assert set(found.repacks) == {"target.moved.weight", "draft.moved.weight"}
    assert found.learned
    for path, model in zip(("target", "draft"), rank.models, strict=True):
        assert found.constants(f"{path}.steps", model.steps)
        assert not found.constants(f"{path}.int8.weight", model.int8.weight)


def test_all_models_checkpoints_are_read_by_their_names() -> None:
    rank = Rank(with_checkpoint(), with_checkpoint())
    reader = checkpoints(rank.observers, rank.models)
    assert reader is not None
    names = [name for name, _ in reader()]
    assert names == [f"{prefix}{n}" for prefix in ("", "draft.") for n in Mixed.checkpoint()]
    rank = Rank(with_checkpoint(), ToyEngine())
    assert checkpoints(rank.observers, rank.models) is None


def test_replaced_modules_are_left_out() -> None:
    rank = Rank(with_checkpoint(), with_checkpoint())
    assert set(observations(rank.observers, ["draft.moved"]).repacks) == {"target.moved.weight"}


@pytest.mark.parametrize(
    "engine", [ToyEngine(), with_checkpoint(refuses="it is quantised while it loads")]
)
def test_loader_that_would_not_load_is_not_traced(engine: ToyEngine) -> None:
    assert Rank(engine).loading.specs is None


def test_moved_modules_are_kept_if_there_is_no_checkpoint() -> None:
    assert Rank(ToyEngine()).states.moved_too
    assert not Rank(with_checkpoint()).states.moved_too


def test_engine_is_as_before_afterwards() -> None:
    engine = with_checkpoint()
    Rank(engine)
    assert (engine.module.make, engine.module.process) == engine.functions
    assert engine.happened[0] == "constants kept"
    assert engine.happened[-1] == "constants left"


def test_engine_is_as_before_if_loading_fails() -> None:
    engine = with_checkpoint()
    observer = ModelLoadObserver(engine, LoadingTrace(), UnprocessedModules(LIMIT))
    with pytest.raises(OSError, match="no file"), observer:
        raise OSError("no file")
    assert (engine.module.make, engine.module.process) == engine.functions
    assert observer.model is None


def test_engine_is_as_before_if_watching_cannot_begin() -> None:
    engine = with_checkpoint()
    del engine.module.make
    observer = ModelLoadObserver(engine, LoadingTrace(), UnprocessedModules(LIMIT))
    with pytest.raises(AttributeError, match="make"):
        observer.__enter__()
    assert engine.module.process is process
    assert engine.happened == ["constants kept", "constants left"]


def test_model_that_was_not_processed_is_not_learned() -> None:
    observer = ModelLoadObserver(with_checkpoint(), LoadingTrace(), UnprocessedModules(LIMIT))
    with observer:
        pass
    assert not observations([observer], []).learned


def test_engine_that_refuses_the_model_stops_its_start() -> None:
    engine = with_checkpoint()

    def refuse(model: nn.Module) -> None:
        raise RuntimeError("two tensors have one name")

    engine.check = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="one name"):
        Rank(engine)
