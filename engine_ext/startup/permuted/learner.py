"""Hook an engine's post-load processing, and infer its repacks just before the engine runs it.

While a model is loaded, the engine's walk over its modules is preceded by one of ours: each
module's processing is run on a copy that shares nothing the processing could write to, in the
state that the engine's own call will find. Modules that look alike share the result of the first
one; certification later proves it for each of them against the checkpoint's bytes. A module whose
bytes prove nothing is probed for itself, and what shows only after processing is compared then (see
`look_alikes`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from engine_ext.model import PROCESSING, ModelStateGuard, is_constant
from engine_ext.placement import Repack
from engine_ext.startup.permuted.infer import InferredRepacks, infer_repacks
from engine_ext.startup.permuted.kept_values import kept_values
from engine_ext.startup.permuted.look_alikes import LookAlikes, all_equal, signature_of
from engine_ext.startup.permuted.module_copy import ModuleCopy, loaded_tensors, state_of

# Attributes of parameters that their loaders read, in both engines.
_DIMENSIONS: Final = frozenset({"input_dim", "output_dim", "packed_dim"})


@dataclass(frozen=True, slots=True)
class Processing:
    """One call that an engine makes for a module after loading.

    Attributes:
        method: the object whose function is called; its attributes distinguish modules.
        call: makes the call, given a copy of the module.
        recomputed: whether the engine might be able to recompute what the call attaches to the
            module.
    """

    module: torch.nn.Module
    method: object
    call: Callable[[Any], None]
    recomputed: bool = False


Walk = Callable[..., Iterable[Processing]]
"""Called with the engine function's arguments, the model first; returns its calls, in order."""

BeforeProcessing = Callable[[torch.nn.Module], AbstractSet[str]]
"""Called with a loaded model; returns names of live tensors that its loader fills, if known."""


class LearningError(RuntimeError):
    """Probing changed the live model, so it must not be served."""


class RepackLearner:
    """Context manager around a model's loading that infers the repacks of its weights.

    These are its parameters, and the buffers that `before` says are filled by the loader.

    Only the first model loaded in the block counts (a draft model is loaded after it). The engine's
    function `name` in `owner`, a module or class, which processes a loaded model, is replaced
    during the block; `walk` returns the calls that it will make, and `before` is called with the
    loaded model first. `keep` is called with each call that cannot be followed, or after which the
    engine's loader cannot be, and with whether it only moves elements; it returns None if the
    module can be updated all the same, or else why not. With `keep_moved` it is called with those
    that could be followed, too; `before` can still set that.

    Attributes:
        repacks: permutations, by the live parameter's name in the model.
        refusals: why a live parameter cannot be followed, by its name.
        complete: whether the function was called, and `walk` covers everything that it does.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        walk: Walk,
        before: BeforeProcessing | None = None,
        keep: Callable[[Processing, bool], str | None] | None = None,
        *,
        keep_moved: bool = False,
    ) -> None:
        self.repacks: dict[str, Repack] = {}
        self.refusals: dict[str, str] = {}
        self.complete = False
        self._called = False
        self._owner, self._name, self._walk = owner, name, walk
        self._before, self._keep = before, keep
        self.keep_moved = keep_moved
        self._original = inspect.getattr_static(owner, name)
        self._known: dict[Hashable, InferredRepacks] = {}
        self._alike = LookAlikes()

    def __enter__(self) -> RepackLearner:
        original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.learn(model, *args, **kwargs)
            result = original(model, *args, **kwargs)
            self.refusals = self._alike.refusals() | self.refusals
            return result

        # A static method of a class must not become a method.
        static = isinstance(self._original, staticmethod)
        setattr(self._owner, self._name, staticmethod(process) if static else process)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._original)
        self._alike = LookAlikes()  # it keeps modules alive, which the engine might replace

    def learn(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Infer the repacks of a model that the engine is about to process.

        The engine's function is preceded by this; so must be whatever else processes the model.
        Does nothing but the first time.

        Args:
            args, kwargs: those of the engine's function.
        """
        if self._called:
            return
        self._called = True
        self.complete = not hasattr(model, PROCESSING)
        filled = self._before(model) if self._before is not None else frozenset()
        processings = self._walk(model, *args, **kwargs)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        names |= {id(buffer): name for name, buffer in model.named_buffers() if name in filled}
        for processing in processings:
            self._infer_module(model, processing, names)

    def _infer_module(
        self, model: torch.nn.Module, processing: Processing, names: dict[int, str]
    ) -> None:
        parameters = {
            name: tensor
            for name, tensor in loaded_tensors(processing.module)
            if id(tensor) in names and not tensor.is_meta
        }
        if not parameters:
            return
        try:
            module, method = processing.module, processing.method
            group: Hashable = processing.recomputed, signature_of(module, method, parameters)
            known = self._known.get(group)
            if known is not None and _proves_nothing(processing, parameters, known):
                group = group, id(module)
                known = None
            inferred = _infer(model, processing, parameters) if known is None else known
            self._known[group] = inferred
            if inferred.refusals:
                self._alike.leave_out(module)
            else:
                self._alike.add(group, module, [names[id(one)] for one in parameters.values()])
        except LearningError:
            raise
        except Exception as error:
            reason = f"probing its post-load processing failed: {type(error).__name__}: {error}"
            inferred = InferredRepacks({}, dict.fromkeys(parameters, reason))
        alone = self.keep_moved and bool(inferred.repacks)
        followed = not (inferred.replaced or inferred.refusals or alone) or processing.recomputed
        followed |= inferred.outside
        if self._keep is not None and not followed:
            why_not = self._keep(processing, not inferred.refusals)
            refusals = {} if why_not is None else dict.fromkeys(parameters, why_not)
            inferred = InferredRepacks({} if inferred.refusals else inferred.repacks, refusals)
        for name, parameter in parameters.items():
            live = names[id(parameter)]
            if name in inferred.refusals:
                self.refusals.setdefault(live, inferred.refusals[name])
            elif name in inferred.repacks and live in self.repacks:
                self.refusals.setdefault(live, "the post-load processing of two modules moves it")
            elif name in inferred.repacks:
                self.repacks[live] = inferred.repacks[name]


def _proves_nothing(
    processing: Processing, parameters: Mapping[str, torch.Tensor], known: InferredRepacks
) -> bool:
    """Return whether certification would miss that a module is processed in another way than known.

    It would for tensors whose elements are all the same. If nothing is known to happen, only these
    are probed, and only for what the module alone shows.
    """
    equal = {name: one for name, one in parameters.items() if all_equal(one)}
    if known.refusals or not equal:
        return False
    if known != InferredRepacks({}, {}):
        return True
    return known != _infer(processing.module, processing, equal, values=False)


def _infer(
    model: torch.nn.Module,
    processing: Processing,
    parameters: Mapping[str, torch.Tensor],
    *,
    values: bool = True,
) -> InferredRepacks:
    """Infer the repacks of one module; its loaded buffers are among its `parameters`.

    Nothing in `model` must change meanwhile. With `values`, numbers are looked for, too.

    If the engine might recompute what the processing attaches to the module, no parameter is
    refused for tensors that `find_derived` will find on the loaded model: they are then either
    proven to be recomputed, or a reason to refuse.
    """
    module = processing.module
    copies: list[ModuleCopy] = []

    def run(probes: dict[str, torch.Tensor]) -> torch.nn.Module:
        copies.append(ModuleCopy(module, {id(parameters[name]): t for name, t in probes.items()}))
        processing.call(copies[-1].root)
        # Kept until here, so that two calls never get the same address, or a handle made of it.
        for old in copies[:-1]:
            old.release()
        del copies[:-1]
        root: torch.nn.Module = copies[0].root
        return root

    def process(probes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        run(probes)
        found = copies[0].tensors(probes.keys())
        return {
            name: tensor
            for name, tensor in found.items()
            if name in probes or not (processing.recomputed and _found_later(module, name, tensor))
        }

    before, guard = state_of(module), ModelStateGuard(model, bits=False)
    devices = {p.device.index for p in parameters.values() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices)):
            inferred = infer_repacks(parameters, process)
            after = dict(loaded_tensors(copies[-1].root)) if copies else parameters
            refusals = _marked(parameters, after) | inferred.refusals
            inferred = replace(inferred, refusals=refusals, replaced=_replaced(parameters, after))
            followed = values and len(inferred.refusals) < len(parameters)
            if followed and (kept := kept_values(parameters, run)):
                reason = f"post-load processing also keeps {', '.join(kept)}, computed from weights"
                refusals = dict.fromkeys(parameters, reason) | inferred.refusals
                inferred = replace(inferred, repacks={}, refusals=refusals)
    finally:
        for old in copies:
            old.release()
    if state_of(module) != before or guard.written():
        names = ", ".join(guard.written()) or type(module).__name__
        raise LearningError(f"probing post-load processing changed the live {names}")
    if guard.contents_changed():
        guard.restore()
        reason = "post-load processing of a copy writes to the live model"
        return InferredRepacks({}, dict.fromkeys(parameters, reason), outside=True)
    return inferred


def _replaced(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    """Return whether some parameter is of another class or layout, or has lost attributes."""
    return any(
        name not in after
        or type(after[name]) is not type(parameter)
        or (after[name].shape, after[name].stride()) != (parameter.shape, parameter.stride())
        or vars(after[name]).keys() != vars(parameter).keys()
        for name, parameter in before.items()
    )


def _marked(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return why parameters cannot be followed that processing gives numbers as attributes.

    Such a number might depend on the weights though no probe shows it: whether all scales are
    powers of two, say.
    """
    refusals = {}
    for name in before.keys() & after.keys():
        new = vars(after[name]).keys() - vars(before[name]).keys()
        values = {n: vars(after[name])[n] for n in sorted(new - _DIMENSIONS)}
        given = [n for n, value in values.items() if isinstance(value, (bool, int, float))]
        if given:
            refusals[name] = f"post-load processing might compute its {', '.join(given)}"
    return refusals


def _found_later(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Return whether `find_derived` is sure to find a tensor that the processing makes.

    It must be a new attribute of the module itself, and not of a kind that passes for a constant,
    whatever its values.
    """
    new = name.isidentifier() and not isinstance(getattr(module, name, None), torch.Tensor)
    return new and tensor.is_floating_point() and not is_constant(name, tensor)
