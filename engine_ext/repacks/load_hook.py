"""An engine's post-load processing, learned on copies just before the engine runs it.

While a model is loaded, the engine's walk over its modules is preceded by ours: each module's own
processing is run on a twin that shares nothing the processing could write to, in the state that
the engine's first call will find. Modules that are alike share what was learned of the first one;
certification later proves it for each of them against the checkpoint's bytes.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from engine_ext.model.constants import is_constant
from engine_ext.placement.segments import Repack
from engine_ext.repacks.infer import Learned, learn
from engine_ext.repacks.module_copy import PROCESSING, ModuleCopy, state_of


@dataclass(frozen=True, slots=True)
class Processing:
    """One call that an engine makes for a module after loading.

    Attributes:
        module: the live module.
        method: the object whose function is called; its traits tell modules apart.
        call: makes the call, given the module's twin.
        recomputed: whether the engine may be able to recompute what the call hangs on the module.
    """

    module: torch.nn.Module
    method: object
    call: Callable[[Any], None]
    recomputed: bool = False


Walk = Callable[..., Iterable[Processing]]
"""Takes what the engine's function takes, the model first; gives what it will call, in order."""


class LearningError(RuntimeError):
    """Learning changed the live model, so it must not be served."""


class RepackLearner:
    """Learns what an engine does to a model's weights after loading; use it around the loading.

    Only the first model that is loaded meanwhile counts (a draft model is loaded after it).

    Args:
        owner: the engine's module or class that has the function which processes a loaded model.
        name: that function's name; it is replaced for the time of the learning.
        walk: what that function will call for each module.

    Attributes:
        repacks: moves, by the live parameter's name in the model.
        refusals: why a live parameter cannot be followed, by its name.
        complete: whether the function was called, and `walk` told all that it does.
        seconds: time spent.
    """

    def __init__(self, owner: Any, name: str, walk: Walk) -> None:
        self.repacks: dict[str, Repack] = {}
        self.refusals: dict[str, str] = {}
        self.complete = False
        self.seconds = 0.0
        self._owner = owner
        self._name = name
        self._walk = walk
        self._original = inspect.getattr_static(owner, name)
        self._known: dict[Any, Learned] = {}

    def __enter__(self) -> RepackLearner:
        original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.complete:
                self.complete = not hasattr(model, PROCESSING)
                self._learn_model(model, self._walk(model, *args, **kwargs))
            return original(model, *args, **kwargs)

        # A function stays one where it hangs on a class.
        static = isinstance(self._original, staticmethod)
        setattr(self._owner, self._name, staticmethod(process) if static else process)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._original)

    def _learn_model(self, model: torch.nn.Module, processings: Iterable[Processing]) -> None:
        start = time.perf_counter()
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        for processing in processings:
            self._learn_module(processing, names)
        self.seconds = time.perf_counter() - start

    def _learn_module(self, processing: Processing, names: dict[int, str]) -> None:
        parameters = {n: p for n, p in processing.module.named_parameters() if not p.is_meta}
        if not parameters:
            return
        try:
            signature = _signature(processing, parameters)
            if signature not in self._known:
                self._known[signature] = _learn(processing, parameters)
            self._note(self._known[signature], parameters, names)
        except LearningError:
            raise
        except Exception as error:
            reason = f"learning what is done to it failed: {type(error).__name__}: {error}"
            self._note(Learned({}, dict.fromkeys(parameters, reason)), parameters, names)

    def _note(
        self, learned: Learned, parameters: dict[str, torch.nn.Parameter], names: dict[int, str]
    ) -> None:
        for name, parameter in parameters.items():
            live = names[id(parameter)]
            if name in learned.refusals:
                self.refusals.setdefault(live, learned.refusals[name])
            elif name in learned.repacks and live in self.repacks:
                self.refusals.setdefault(live, "the post-load processing of two modules moves it")
            elif name in learned.repacks:
                self.repacks[live] = learned.repacks[name]


def _learn(processing: Processing, parameters: dict[str, torch.nn.Parameter]) -> Learned:
    """Learn one module's processing.

    Where the engine may recompute what is hung on the module, no parameter is refused for what
    will be found there once the model is loaded, and is either proven to follow then, or is a
    reason to refuse.

    Raises:
        LearningError: the live module is not what it was.
    """
    module = processing.module
    twins: list[ModuleCopy] = []

    def process(probes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        twins.append(ModuleCopy(module, {id(parameters[name]): t for name, t in probes.items()}))
        processing.call(twins[-1].root)
        # Kept until here, so that no two calls make a handle (an address) that is the same.
        for old in twins[:-1]:
            old.dissolve()
        del twins[:-1]
        found = twins[0].tensors(probes.keys())
        return {
            name: tensor
            for name, tensor in found.items()
            if name in probes or not (processing.recomputed and _found_later(module, name, tensor))
        }

    before = state_of(module)
    devices = {p.device.index for p in parameters.values() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices)):
            learned = learn(parameters, process)
    finally:
        for old in twins:
            old.dissolve()
    if state_of(module) != before:
        raise LearningError(f"learning changed a live {type(module).__name__}")
    return learned


def _found_later(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether `find_derived` cannot miss a tensor that the processing makes: a new attribute of the
    module itself, and not of a kind that is taken for a constant, whatever its values.
    """
    new = "." not in name and not isinstance(getattr(module, name, None), torch.Tensor)
    large = tensor.numel() > 1 and tensor.is_floating_point()
    return new and large and not is_constant(name, tensor)


def _signature(processing: Processing, parameters: dict[str, Any]) -> Any:
    """Two modules with one signature are alike, as far as can be told."""
    module, method = processing.module, processing.method
    return (
        type(module),
        type(method),
        _traits(method),
        processing.recomputed,
        tuple((n, p.shape, p.stride(), p.dtype, p.device.type) for n, p in parameters.items()),
        tuple((name, _traits(part)) for name, part in module.named_modules()),
    )


def _traits(thing: object) -> tuple[Any, ...]:
    """An object's attributes by name and type; switches by value (but a layer's number varies)."""
    return tuple(
        (name, value if isinstance(value, (bool, Enum, torch.dtype)) else type(value))
        for name, value in sorted(vars(thing).items())
    )
