"""Watch an engine load a model: the same for both engines.

Just before the engine processes the model, its loader is run dry. Then the processing of each
module is probed, and modules that it computes are kept unprocessed. The observations become part
of the `LoadedModel` that start-up begins with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine_ext.adapters.target_and_draft import ModelRole, outside, read
from engine_ext.model import ConstantsWatch
from engine_ext.placement import Repack
from engine_ext.startup import (
    BeforeProcessing,
    CheckpointReader,
    LoadingTrace,
    LoadWeights,
    RepackLearner,
    UnprocessedModules,
    make_unprocessed_model,
)


class EngineLoad(Protocol):
    """How an engine loads one model of this rank.

    Attributes:
        role: the model's place in the receiver's model.
    """

    @property
    def role(self) -> ModelRole: ...

    def constants_kept(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which dummy weights do not replace the constructor's constants."""

    def learner(
        self, before: BeforeProcessing, states: UnprocessedModules
    ) -> contextlib.AbstractContextManager[RepackLearner]:
        """Return the context in which post-load processing is learned.

        Args:
            before: called with the model before it is processed, see `RepackLearner`.
            states: keeps what cannot be followed.
        """

    def constructor(self) -> tuple[Any, str]:
        """Return the engine's function that constructs the model: its module, and its name."""

    def check(self, model: torch.nn.Module) -> None:
        """Raise RuntimeError if the model cannot be updated: the engine must not start then."""

    def reader(self, model: torch.nn.Module) -> CheckpointReader | None:
        """Return a reader of the loaded checkpoint; None if there is none."""

    def load_function(self, model: Any) -> LoadWeights:
        """Return the engine's function that loads checkpoint tensors into a model."""

    def refuse_while(self, model: torch.nn.Module) -> str | None:
        """Return why the loader would not simply load now, or None."""


Engine = TypeVar("Engine", bound=EngineLoad)


class ModelLoadObserver(Generic[Engine]):
    """Context manager in which a rank loads one model.

    Args:
        engine: how it is loaded.
        loading, states: of all models of the rank.

    Attributes:
        model: as it was when its processing began; None before.
        learner, constants: of its loading.
    """

    def __init__(self, engine: Engine, loading: LoadingTrace, states: UnprocessedModules) -> None:
        self.engine = engine
        self.model: torch.nn.Module | None = None
        self.learner: RepackLearner
        self.constants: ConstantsWatch
        self._loading, self._states = loading, states
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> ModelLoadObserver[Engine]:
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(self.engine.constants_kept())
            self.learner = hooks.enter_context(self.engine.learner(self._trace, self._states))
            # It keeps the function that it finds, which can be the learner's by now.
            watch = ConstantsWatch(*self.engine.constructor())
            self.constants = hooks.enter_context(watch)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    @property
    def role(self) -> ModelRole:
        """The model's place in the receiver's model."""
        return self.engine.role

    def _trace(self, model: torch.nn.Module) -> AbstractSet[str]:
        """Trace the loader of the model, which is not processed yet but for what was on loading.

        Returns:
            See `LoadingTrace.trace`.
        """
        self.model, role = model, self.role
        self.engine.check(model)
        reader = self.engine.reader(model)
        self._states.moved_too = reader is None
        inside = {id(module) for module in model.modules()}
        states = [state for state in self._states.states if id(state.module) in inside]
        unprocessed = make_unprocessed_model(model, states)
        return self._loading.trace(
            *(unprocessed, self.engine.load_function(unprocessed), reader),
            self.engine.refuse_while,
            path=role.path,
            prefix=role.prefix,
        )

    def known(self, path: str, tensor: torch.Tensor) -> bool:
        """Return `ConstantsWatch.known`, by the path in the receiver's model."""
        return self.constants.known(self.role.inside(path), tensor)


def checkpoints(
    observers: Sequence[ModelLoadObserver[Any]], models: Sequence[torch.nn.Module]
) -> CheckpointReader | None:
    """Return a reader of the checkpoints of the loaded models, or None if one has none."""
    readers = [one.engine.reader(model) for one, model in zip(observers, models, strict=True)]
    if None in readers:
        return None
    roles = [one.role for one in observers]
    return lambda: read(roles, [reader() for reader in readers if reader is not None])


@dataclass(frozen=True, slots=True)
class LoadObservations:
    """The observations of all models of a rank; see `LoadedModel` for the attributes."""

    repacks: Mapping[str, Repack]
    refusals: Mapping[str, str]
    learned: bool
    constants: Callable[[str, torch.Tensor], bool]


def observations(
    observers: Sequence[ModelLoadObserver[Any]], replaced: Iterable[str]
) -> LoadObservations:
    """Return the observations from the loading of the models.

    Args:
        replaced: paths of the modules that the engine has since replaced by others.
    """
    replaced = list(replaced)
    repacks: dict[str, Repack] = {}
    refusals: dict[str, str] = {}
    for one in observers:
        repacks |= outside(replaced, one.role.by_path(one.learner.repacks))
        refusals |= outside(replaced, one.role.by_path(one.learner.refusals))
    return LoadObservations(
        repacks,
        refusals,
        all(one.learner.complete for one in observers),
        lambda path, tensor: any(one.known(path, tensor) for one in observers),
    )
