"""vLLM's post-load processing, learned on copies just before the engine runs it.

While a model is loaded, the engine's walk over its modules is preceded by ours: each module's own
processing is run on a twin that shares nothing the processing could write to, in the state that
the engine's first call will find. Modules that are alike share what was learned of the first one;
certification later proves it for each of them against the checkpoint's bytes.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch

from engine_ext.derived import is_constant
from engine_ext.placement import Repack
from engine_ext.repack import Learned, fingerprint, learn

_PROCESSING = "process_weights_after_loading"
_DEPTH = 6


class LearningError(RuntimeError):
    """Learning changed the live model, so it must not be served."""


class RepackLearner:
    """Learns what vLLM does to a model's weights after loading them; use it around `load_model`.

    Only the first model that is loaded meanwhile counts (a draft model is loaded after it).

    Attributes:
        repacks: moves, by the live parameter's name in the model.
        refusals: why a live parameter cannot be followed, by its name.
        seconds: time spent.
    """

    def __init__(self) -> None:
        self.repacks: dict[str, Repack] = {}
        self.refusals: dict[str, str] = {}
        self.seconds = 0.0
        self._known: dict[Any, Learned] = {}
        self._done = False
        self._original: Callable[..., Any] | None = None

    def __enter__(self) -> RepackLearner:
        from vllm.model_executor.model_loader import base_loader

        original = base_loader.process_weights_after_loading
        self._original = original

        @functools.wraps(original)
        def process(model: torch.nn.Module, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._done:
                self._done = True
                self._learn_model(model, model_config.dtype)
            return original(model, model_config, *args, **kwargs)

        base_loader.process_weights_after_loading = process
        return self

    def __exit__(self, *error: object) -> None:
        from vllm.model_executor.model_loader import base_loader

        base_loader.process_weights_after_loading = self._original

    def _learn_model(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        start = time.perf_counter()
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        for module in model.modules():
            self._learn_module(module, dtype, names)
        self.seconds = time.perf_counter() - start

    def _learn_module(
        self, module: torch.nn.Module, dtype: torch.dtype, names: dict[int, str]
    ) -> None:
        parameters = {n: p for n, p in module.named_parameters() if not p.is_meta}
        try:
            for call, method in _processings(module, dtype) if parameters else ():
                signature = _signature(module, method, parameters)
                if signature not in self._known:
                    # What an attention layer makes for itself may be recomputed (`recomputations`).
                    recomputed = method is module
                    self._known[signature] = _learn(module, call, parameters, recomputed)
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


def _processings(
    module: torch.nn.Module, dtype: torch.dtype
) -> Iterator[tuple[Callable[[Any], None], object]]:
    """What the engine's walk will call for a module: the call, given its twin, and its owner."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        yield (lambda twin: twin.quant_method.process_weights_after_loading(twin)), method
    if is_deferred_attention_layer(module):
        yield (lambda twin: twin.process_weights_after_loading(dtype)), module


def _learn(
    module: torch.nn.Module,
    call: Callable[[Any], None],
    parameters: dict[str, torch.nn.Parameter],
    recomputed: bool,
) -> Learned:
    """Learn one module's processing.

    Args:
        recomputed: whether the engine may be able to recompute what the processing hangs on the
            module. No parameter is refused then for what will be found there once the model is
            loaded, and either proven to follow or a reason to refuse.

    Raises:
        LearningError: the live module is not what it was.
    """

    twins: list[_Twins] = []

    def process(probes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        twins.append(_Twins(module, {id(parameters[name]): t for name, t in probes.items()}))
        call(twins[-1].root)
        # Kept until here, so that no two calls make a handle (an address) that is the same.
        for old in twins[:-1]:
            old.dissolve()
        del twins[:-1]
        found = twins[0].tensors(probes.keys())
        return {
            name: tensor
            for name, tensor in found.items()
            if name in probes or not (recomputed and _found_later(module, name, tensor))
        }

    before = _state(module)
    devices = {p.device.index for p in parameters.values() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(devices)):
            learned = learn(parameters, process)
    finally:
        for old in twins:
            old.dissolve()
    if _state(module) != before:
        raise LearningError(f"learning changed a live {type(module).__name__}")
    return learned


def _found_later(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether `find_derived` cannot miss a tensor that the processing makes: a new attribute of the
    module itself, and not of a kind that is taken for a constant, whatever its values.
    """
    new = "." not in name and not isinstance(getattr(module, name, None), torch.Tensor)
    large = tensor.numel() > 1 and tensor.is_floating_point()
    return new and large and not is_constant(name, tensor)


def _state(module: torch.nn.Module) -> list[Any]:
    """Everything by which a module would show that something wrote to it."""
    state: list[Any] = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        address = 0 if tensor.is_meta else tensor.data_ptr()
        state.append((name, id(tensor), address, fingerprint(tensor)))
    for name, part in module.named_modules():
        for thing in (part, getattr(part, "quant_method", None)):
            if hasattr(thing, "__dict__"):
                state.append((name, [(key, id(value)) for key, value in vars(thing).items()]))
    return state


def _signature(module: torch.nn.Module, method: object, parameters: dict[str, Any]) -> Any:
    """Two modules with one signature are alike, as far as can be told."""
    return (
        type(module),
        type(method),
        _traits(method),
        tuple((n, p.shape, p.stride(), p.dtype, p.device.type) for n, p in parameters.items()),
        tuple((name, _traits(part)) for name, part in module.named_modules()),
    )


def _traits(thing: object) -> tuple[Any, ...]:
    """An object's attributes by name and type; switches by value (but a layer's number varies)."""
    return tuple(
        (name, value if isinstance(value, (bool, Enum, torch.dtype)) else type(value))
        for name, value in sorted(vars(thing).items())
    )


class _Twins:
    """A copy of a module and of everything that its processing may write to.

    Copied are the module and those below it, the objects on them that take part in post-load
    processing (quant methods, schemes, attention backends), and plain containers. Tensors are
    cloned; the rest is shared.

    Args:
        module: the live module.
        probes: what stands in for its parameters, by the `id` of the parameter.
    """

    def __init__(self, module: torch.nn.Module, probes: dict[int, torch.Tensor]) -> None:
        self._probes = probes
        self._made: dict[int, Any] = {}
        self._copies: list[tuple[str, Any, Any]] = []
        modules = [(path, part, self._begin(path, part)) for path, part in module.named_modules()]
        for path, part, twin in modules:
            self._fill(path, part, twin)
        self.root = modules[0][2]

    def _begin(self, path: str, original: Any) -> Any:
        twin = object.__new__(type(original))
        self._made[id(original)] = twin
        self._copies.append((path, original, twin))
        return twin

    def _fill(self, path: str, original: Any, twin: Any) -> None:
        for name, value in vars(original).items():
            vars(twin)[name] = self._copied(f"{path}.{name}".lstrip("."), value)

    def _copied(self, path: str, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        twin = value
        if isinstance(value, torch.Tensor):
            twin = self._made[id(value)] = self._tensor(value)
        elif type(value) is dict:
            twin = self._made[id(value)] = {}
            twin.update({name: self._copied(f"{path}.{name}", v) for name, v in value.items()})
        elif type(value) is list:
            twin = self._made[id(value)] = []
            twin.extend(self._copied(path, item) for item in value)
        elif type(value) is set:
            twin = set(value)
        elif callable(getattr(type(value), _PROCESSING, None)) and not isinstance(
            value, torch.nn.Module
        ):
            twin = self._begin(path, value)
            self._fill(path, value, twin)
        return twin

    def _tensor(self, original: torch.Tensor) -> torch.Tensor:
        twin = self._probes.get(id(original))
        if twin is None:
            twin = original.detach().clone()
        if isinstance(original, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=False)
        twin.__class__ = type(original)
        vars(twin).update(vars(original))
        return twin

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The parameters of these names, and all tensors found that lie elsewhere."""
        parameters: dict[str, torch.Tensor] = dict(self.root.named_parameters())
        found = {name: parameters[name] for name in names if name in parameters}
        memory = {_memory(tensor) for tensor in found.values()}
        seen = {id(twin) for _, _, twin in self._copies}
        for path, original, twin in self._copies:
            for name, value in vars(twin).items():
                if value is not vars(original).get(name):
                    for place, tensor in _tensors(f"{path}.{name}", value, seen):
                        if _memory(tensor) not in memory:
                            found[re.sub(r"^\.|_(parameters|buffers)\.", "", place)] = tensor
        return found

    def dissolve(self) -> None:
        """Let go of every tensor, cycles or not."""
        for _, _, twin in self._copies:
            vars(twin).clear()


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _tensors(
    path: str, value: Any, seen: set[int], depth: int = _DEPTH
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a value: itself, in containers, on plain objects, in closures."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and id(value) not in seen and not isinstance(value, torch.nn.Module):
        seen.add(id(value))
        for name, inner in _parts(value):
            yield from _tensors(f"{path}.{name}", inner, seen, depth - 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, functools.partial):
        return [*enumerate(value.args), *value.keywords.items(), ("func", value.func)]
    if isinstance(value, types.FunctionType):
        captured = inspect.getclosurevars(value).nonlocals
        return [*captured.items(), *enumerate(value.__defaults__ or ())]
    attributes: dict[str, Any] = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return attributes.items()
