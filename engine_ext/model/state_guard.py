"""Snapshot model state so that a dry run can be undone and verified.

A loader whose writes to memory are suppressed still runs its Python code: it can attach other
tensors to the modules, or give a parameter other memory. `ModelStateGuard` detects that by
comparing objects and addresses, restores them, and can verify that every bit is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine_ext.kernels import same_device
from engine_ext.model.constants import is_cache
from engine_ext.model.fingerprint import hash_memory, location
from engine_ext.model.leaves import same_leaf
from engine_ext.model.module_walk import reachable_containers, reachable_tensors, takes_part
from engine_ext.model.storage_index import live_tensors

_REGISTRIES: Final = ("_parameters", "_buffers")
_DICTS: Final = (*_REGISTRIES, "_modules", "__dict__")
_BATCH: Final = 4 << 20  # bytes that a thread hashes at a time, at least


class TracingError(RuntimeError):
    """Tracing changed the model, so its results cannot be trusted."""


@dataclass(frozen=True, slots=True)
class AttachedTensor:
    """A tensor attached to a module, or to an object on it, as it was when this was made.

    Attributes:
        owner: the module or object.
        name, path: the tensor's name on the owner, and its path in the model.
        registry: the owner's dict that holds it: ``_parameters``, ``_buffers``, or ``__dict__``
            for a plain attribute.
        memory: a view of the memory that it had.
    """

    owner: object
    name: str
    path: str
    registry: str
    tensor: torch.Tensor
    memory: torch.Tensor

    @property
    def current(self) -> torch.Tensor | None:
        """The tensor that has its name now; None if there is none."""
        found = getattr(self.owner, self.registry).get(self.name)
        return found if isinstance(found, torch.Tensor) else None

    @property
    def changed(self) -> bool:
        """Whether another tensor has its name now, or it has other memory."""
        return self.current is not self.tensor or location(self.tensor) != location(self.memory)

    def restore(self) -> None:
        """Attach the tensor again, and give it its memory again; nothing is copied."""
        getattr(self.owner, self.registry)[self.name] = self.tensor
        if location(self.tensor) != location(self.memory):
            self.tensor.data = self.memory


class ModelStateGuard:
    """Snapshot of a model's tensors, modules and containers: objects and addresses.

    Args:
        model: no tensor of it is copied.
        bits: whether to hash every tensor as well, which reads the whole model once.

    Attributes:
        registered: every parameter and buffer, under every name that it has.
        attributes: every tensor that is a plain attribute of a module, or of an object on it that
            takes part in processing.
    """

    def __init__(self, model: torch.nn.Module, *, bits: bool) -> None:
        self._model = model
        modules = dict(model.named_modules(remove_duplicate=False))
        self._tensors = _tensors_by_path(model)
        attached = list(attached_tensors(modules))
        self.registered = [a for a in attached if a.registry in _REGISTRIES]
        self.attributes = [a for a in attached if a.registry not in _REGISTRIES]
        self._bits = bits
        with _hashing(self._memory()) as hashes:
            containers = [getattr(m, name) for m in modules.values() for name in _DICTS]
            containers += reachable_containers(model)
            for tensor in {id(a.tensor): a.tensor for a in attached}.values():
                containers += _nested(vars(tensor), set())  # loaders keep shards and counters there
            self._containers = [(c, c.copy()) for c in containers]
            self._identities = _identities(model)
            self._writes = _writes(self._tensors)
        self._hashes = hashes

    def written(self) -> list[str]:
        """Return the paths of the tensors that were written to in place, as far as torch counts."""
        before, now = self._writes, _writes(_tensors_by_path(self._model))
        return sorted(path for path in before.keys() & now.keys() if before[path] != now[path])

    def contents_changed(self) -> bool:
        """Return whether a dict or list, or the attributes of an object, hold something else."""
        return any(content_changed(one, before) for one, before in self._containers)

    def known_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the snapshot, wherever they are reached from, with their paths."""
        yield from self._tensors.items()

    def new_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors at paths that had no tensor or another one, with their paths."""
        for path, tensor in _tensors_by_path(self._model).items():
            if self._tensors.get(path) is not tensor:
                yield path, tensor

    def restore(self) -> None:
        """Undo everything that a loader can do to the modules except writes to memory."""
        for container, content in self._containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        for attached in self.registered + self.attributes:
            attached.restore()

    def verify(self) -> None:
        """Verify that the model is as it was; with `bits`, bit for bit.

        Raises:
            TracingError: it is not. The model must not be served then.
        """
        with _hashing(self._memory()) as hashes:
            if _identities(self._model) != self._identities:
                raise TracingError("tracing the loader replaced or moved tensors of the model")
            now = _tensors_by_path(self._model)
            paths = now.keys() | self._tensors.keys()
            changed = sorted(p for p in paths if now.get(p) is not self._tensors.get(p))
            if changed:
                raise TracingError(f"tracing the loader left other tensors in {', '.join(changed)}")
        if hashes != self._hashes:
            names = sorted(n for n, h in self._hashes.items() if hashes.get(n) != h)
            raise TracingError(
                f"tracing the loader wrote to the model in a way that cannot be followed: {names}"
            )

    def _memory(self) -> dict[str, torch.Tensor]:
        """Return the memory to hash: each distinct piece but caches, by its first path."""
        if not self._bits:
            return {}
        found: dict[Any, tuple[str, torch.Tensor]] = {}
        known = [(attached.path, attached.memory) for attached in self.registered + self.attributes]
        # Tensors in objects of modules, too.
        inside = [(path, one) for path, one in self._tensors.items() if not is_cache(path)]
        for path, memory in [*known, *inside]:
            key = location(memory)
            strided = memory.layout == torch.strided and not memory.is_meta
            if strided and key not in found and memory.numel():
                found[key] = (path, memory)
        return dict(found.values())


@contextmanager
def _hashing(memory: Mapping[str, torch.Tensor]) -> Iterator[dict[str, str]]:
    """Hash pieces of memory while the block runs, which must not write to them.

    Yields a dict that holds the hashes, by path, once the block is left without an exception.
    """
    hashes: dict[str, str] = {}
    if not memory:
        yield hashes
        return
    # On a device, hashing needs much memory besides.
    host = all(one.device.type == "cpu" for one in memory.values())
    threads = torch.get_num_threads() if host else 1
    with ThreadPoolExecutor(threads, initializer=same_device()) as pool:
        batches = pool.map(_hash_all, _batches(memory))
        yield hashes
        for batch in batches:
            hashes.update(batch)


def _hash_all(memory: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
    return [(path, hash_memory(one)) for path, one in memory]


def _batches(memory: Mapping[str, torch.Tensor]) -> list[list[tuple[str, torch.Tensor]]]:
    """Divide pieces of memory among threads: the largest first, many small ones together."""
    largest_first = sorted(memory.items(), key=lambda item: -item[1].nbytes)
    batches: list[list[tuple[str, torch.Tensor]]] = []
    left = 0
    for item in largest_first:
        if left <= 0:
            batches.append([])
            left = _BATCH
        batches[-1].append(item)
        left -= item[1].nbytes
    return batches


def content_changed(container: Any, before: Any) -> bool:
    """Return whether a dict, list or set holds something else than before.

    An equal value in place of another, such as a number that was assigned anew, is the same.
    """
    if isinstance(container, set):
        return bool(container != before)
    if len(container) != len(before):
        return True
    if isinstance(container, dict):
        if container.keys() != before.keys():
            return True
        return not all(same_leaf(value, before[key]) for key, value in container.items())
    return not all(map(same_leaf, container, before))


def attached_tensors(modules: Mapping[str, torch.nn.Module]) -> Iterator[AttachedTensor]:
    """Yield every strided tensor attached directly to one of some modules, given by path.

    So are those of the objects on them that take part in post-load processing, such as the backend
    of an attention layer.
    """
    for path, module in modules.items():
        owners: list[tuple[str, object, tuple[str, ...]]] = [(path, module, _REGISTRIES)]
        for name, value in vars(module).items():
            if takes_part(value):
                owners.append((f"{path}.{name}".lstrip("."), value, ()))
        for place, owner, registries in owners:
            for registry in (*registries, "__dict__"):
                for name, tensor in getattr(owner, registry).items():
                    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                        full = f"{place}.{name}".lstrip(".")
                        yield AttachedTensor(owner, name, full, registry, tensor, tensor.data)


def _tensors_by_path(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{path}.{name}".lstrip("."): t for path, _, name, t in reachable_tensors(model)}


def _nested(container: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a dict, list or set, and those in it, except those whose ids are `seen`."""
    if isinstance(container, (dict, list, set)) and id(container) not in seen:
        seen.add(id(container))
        yield container
        for value in container.values() if isinstance(container, dict) else container:
            yield from _nested(value, seen)


def _writes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return how often each tensor was written to, except where torch does not count it."""
    return {path: t._version for path, t in tensors.items() if not t.is_inference()}


def _identities(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    return {name: (id(tensor), *location(tensor)) for name, tensor in live_tensors(model)}
