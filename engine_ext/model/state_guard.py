"""A model as it was: what is put back after a loader ran for show, and the proof that it is.

A loader that is only watched still does in Python what it does: it may hang other tensors on the
modules, or give a parameter other memory. `ModelStateGuard` finds that by comparing objects and
addresses, puts it back, and can tell whether every bit is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model.module_walk import containers, hanging
from engine_ext.model.storage_index import extent, live_tensors

_CHUNK: Final = 1 << 24
_REGISTRIES: Final = ("_parameters", "_buffers")


class TracingError(RuntimeError):
    """Tracing changed the model, so nothing that it found can be believed."""


@dataclass(frozen=True, slots=True)
class AttachedTensor:
    """A tensor that hangs on a module, as it was.

    Attributes:
        module: the module.
        name, path: its name there, and in the model.
        registry: where the module keeps it: ``_parameters``, ``_buffers``, or ``__dict__`` for a
            plain attribute.
        tensor: the object.
        memory: a view of the memory that it had.
    """

    module: torch.nn.Module
    name: str
    path: str
    registry: str
    tensor: torch.Tensor
    memory: torch.Tensor

    @property
    def now(self) -> torch.Tensor | None:
        """What stands in its place; None: no tensor."""
        found = getattr(self.module, self.registry).get(self.name)
        return found if isinstance(found, torch.Tensor) else None

    @property
    def changed(self) -> bool:
        """Whether another tensor stands in its place, or it has other memory."""
        return self.now is not self.tensor or place(self.tensor) != place(self.memory)

    def put_back(self) -> None:
        """Give its place to the tensor again, and the tensor its memory; nothing is copied."""
        getattr(self.module, self.registry)[self.name] = self.tensor
        if place(self.tensor) != place(self.memory):
            self.tensor.data = self.memory


class ModelStateGuard:
    """Remembers a model's tensors.

    Args:
        model: the model. Nothing of it is copied.
        bits: whether to remember a hash of every tensor too; that reads the whole model once.

    Attributes:
        registered: every parameter and buffer, under every name that it has.
        attributes: every tensor that hangs on a module otherwise, directly.
    """

    def __init__(self, model: torch.nn.Module, *, bits: bool) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._dicts = [
            (getattr(module, registry), dict(getattr(module, registry)))
            for module in self._modules.values()
            for registry in (*_REGISTRIES, "_modules")
        ]
        self._containers = [(c, c.copy()) for c in containers(model)]
        self._hanging = _hung(model)
        self._attributes = [(m.__dict__, dict(m.__dict__)) for m in self._modules.values()]
        held = list(held_tensors(self._modules))
        self.registered = [h for h in held if h.registry in _REGISTRIES]
        self.attributes = [h for h in held if h.registry not in _REGISTRIES]
        self._identities = _identities(model)
        self._hashes = self._hashed() if bits else {}

    def made(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that hang where none, or another one, did, with the place; also in objects."""
        for where, tensor in _hung(self._model).items():
            if self._hanging.get(where) is not tensor:
                yield where, tensor

    def put_back(self) -> None:
        """Undo what a loader may do to the modules in Python, but for writes to memory."""
        for current, before in self._dicts:
            current.clear()
            current.update(before)
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for container, content in self._containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        for held in self.registered + self.attributes:
            held.put_back()

    def require(self) -> None:
        """Prove that the model is what it was.

        Raises:
            TracingError: it is not.
        """
        if _identities(self._model) != self._identities:
            raise TracingError("tracing the loader changed the model's tensors; refusing to go on")
        hung = _hung(self._model)
        places = hung.keys() | self._hanging.keys()
        kept = sorted(p for p in places if hung.get(p) is not self._hanging.get(p))
        if kept:
            raise TracingError(f"tracing the loader left other tensors in {', '.join(kept)}")
        if self._hashes and (now := self._hashed()) != self._hashes:
            names = sorted(n for n, h in self._hashes.items() if now.get(n) != h)
            raise TracingError(
                f"tracing the loader wrote to the model, by a way that cannot be followed: {names}"
            )

    def _hashed(self) -> dict[str, str]:
        """A hash of every piece of memory, by its first name."""
        found: dict[Any, tuple[str, str]] = {}
        for held in self.registered + self.attributes:
            where = place(held.memory)
            if where not in found and held.memory.numel() and not held.memory.is_meta:
                found[where] = (held.path, _hash(held.memory))
        return dict(found.values())


def held_tensors(modules: Mapping[str, torch.nn.Module]) -> Iterator[AttachedTensor]:
    """Every strided tensor that hangs directly on one of some modules, by the modules' paths."""
    for path, module in modules.items():
        for registry in (*_REGISTRIES, "__dict__"):
            for name, tensor in getattr(module, registry).items():
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    full = f"{path}.{name}".lstrip(".")
                    yield AttachedTensor(module, name, full, registry, tensor, tensor.data)


def _hung(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that hangs on the model, by where."""
    return {f"{path}.{name}".lstrip("."): t for path, _, name, t in hanging(model)}


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor's elements lie, and how: device, address, shape, strides, dtype."""
    address = None if tensor.is_meta else tensor.data_ptr()
    return (tensor.device, address, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _identities(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    return {name: (id(tensor), *place(tensor)) for name, tensor in live_tensors(model)}


def _hash(tensor: torch.Tensor) -> str:
    """A hash of all memory from a tensor's first to its last element."""
    memory = tensor.as_strided((extent(tensor),), (1,)).view(torch_bits_dtype(tensor.dtype))
    if memory.device.type != "cpu":
        return weighted_sum(memory)
    raw: Any = memory.view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(raw)


def weighted_sum(memory: torch.Tensor) -> str:
    """A hash of integers on any device: each times a number of its own, added up modulo 2^64.

    Args:
        memory: [n]. Temporaries take 16 bytes for each of some 16 million elements.
    """
    size = min(_CHUNK, len(memory))
    random = torch.Generator(memory.device).manual_seed(1)
    weights = torch.randint(
        -(1 << 62), 1 << 62, (size,), generator=random, dtype=torch.int64, device=memory.device
    )
    parts = (memory[start : start + _CHUNK] for start in range(0, len(memory), _CHUNK))
    sums = [int((part.long() * weights[: len(part)]).sum()) for part in parts]
    return xxhash.xxh3_128_hexdigest(str(sums).encode())
