"""Rebuild one module: process a copy with other weights, and compare it with live memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final

import torch

from engine_ext.model import (
    StorageIndex,
    address_range,
    hash_tensor,
    layout,
    location,
    reachable_tensors,
)
from engine_ext.startup.permuted import loaded_tensors
from engine_ext.startup.recomputed.compare import (
    Pair,
    RebuildError,
    check_replaceable,
    pairs,
)
from engine_ext.startup.recomputed.plain_objects import opaque_part
from engine_ext.startup.recomputed.rebuild import (
    Context,
    Difference,
    Perturbation,
    Probe,
    Rebuild,
    RebuildResult,
    tensor_differences,
)
from engine_ext.startup.recomputed.unprocessed_modules import (
    AttributeElements,
    Change,
    Replacement,
    UnprocessedModule,
    storage_of,
)

logger = logging.getLogger(__name__)

_NO_HANDLES: Final = (bool, float, complex, str, bytes, type(None))
# What the module computes, among what a rebuild gives.
_COMPUTED: Final = "()"


class ModuleRebuild(Rebuild):
    """One module of the live model, which is computed from its unprocessed weights.

    Args:
        path: of the module in the model.
        context: what the engine's processing runs in.
        probe: tries out the module with its handles.

    Attributes:
        state: the module as it was before processing.
        The others are those of `Rebuild`; see `bind` for its names.
    """

    def __init__(
        self,
        path: str,
        state: UnprocessedModule,
        context: Context,
        probe: Probe,
    ) -> None:
        self.path = path
        self.module: torch.nn.Module = state.module
        self.state = state
        self.names = {}
        self.in_place = state.in_place
        self.numel = sum(tensor.numel() for _, tensor in state.weights())
        self.proven = {}
        self._context, self._probe = context, probe
        self._prefix = f"{path}." if path else ""

    def rebuild(self, changes: Mapping[str, Iterable[Change]]) -> RebuildResult:
        """See `Rebuild.rebuild`."""
        left = changes.keys() - {name for name, _ in self.weights()}
        if left:
            raise RebuildError(f"it has no {', '.join(sorted(left))} before processing")
        copy = self.state.copy(changes)
        try:
            in_place = {n: t for n, t in loaded_tensors(copy.root) if n in self.in_place}
            given = {name: hash_tensor(tensor) for name, tensor in in_place.items()}
            with self._processing():
                self.state.process(copy.root)
            now = dict(loaded_tensors(copy.root))
            for name in in_place:
                if name not in now or hash_tensor(now[name]) != given[name]:
                    raise RebuildError(f"processing changes {name}, which it left as it was before")
            # The sync itself writes to what is in place, under whichever name.
            return self._rebuilt(copy.root, {id(now[name]) for name in in_place})
        finally:
            copy.release()

    def is_intact(self, expected: Mapping[str, str]) -> bool:
        """See `Rebuild.is_intact`.

        All of the module's tensors and values are compared, and what it computes with its handles.
        """
        found = self.rebuild({})
        computed = found.fingerprints.get(_COMPUTED)
        return (
            not found.unlike(expected)
            and all(d.path not in self.proven for d in found.differences)
            and (computed is None or self._computes(self.module) == computed)
        )

    def check_old_values(self) -> None:
        """Do nothing: processing begins with the unprocessed weights."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers before processing, by their names in the module."""
        yield from self.state.weights()

    def shares(self, name: str) -> bool:
        """Return whether processing can reach an unprocessed weight by another way."""
        return name in self.state.shared

    def shared_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors of objects that the live module and its copies both hold."""
        copied = {id(tensor) for _, _, _, tensor in reachable_tensors(self.state.before)}
        around = (tensor for _, _, _, tensor in reachable_tensors(self.module))
        found = {location(t): t for t in around if id(t) in copied and not t.is_meta}
        return list(found.values())

    def keeps(self, name: str) -> bool:
        """Return whether the live module still has an unprocessed weight, with elements."""
        return any(n == name and tensor.numel() for n, tensor in loaded_tensors(self.module))

    def bind(self, index: StorageIndex) -> None:
        """Look up the unprocessed weights in the unprocessed model's index."""
        entries = {(entry.start, entry.end): entry.name for entry in index.entries}
        for name, tensor in self.weights():
            found = entries.get(address_range(tensor))
            if found is not None:
                self.names[found] = name

    def contains(self, name: str) -> bool:
        """Return whether a tensor, given by its name in the model, is in the module."""
        return name.startswith(self._prefix)

    def live_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the live module."""
        return [*self.module.parameters(), *self.module.buffers()]

    def find_in_place(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of the live module that processing leaves where and as they are.

        They are found by processing a copy with other bits in each of them; none if the engine
        raises then. All ranks must call it.
        """
        live = dict(loaded_tensors(self.module))
        places = {name: (storage_of(t), int(t.storage_offset())) for name, t in live.items()}
        same = {
            name: tensor
            for name, tensor in self.state.weights()
            if places.get(name) == self.state.memory[name] and _alike(live[name], tensor)
        }
        if not same:
            return []
        copy = self.state.copy()
        try:
            for name, tensor in loaded_tensors(copy.root):
                if name in same:
                    Perturbation().within(tensor).put(Perturbation.new)
            given = {name: hash_tensor(tensor) for name, tensor in loaded_tensors(copy.root)}
            with self._processing():
                self.state.process(copy.root)
            kept = dict(loaded_tensors(copy.root))
            return [
                (name, live[name])
                for name, tensor in same.items()
                if name in kept
                and _alike(kept[name], tensor)
                and hash_tensor(kept[name]) == given[name]
                and hash_tensor(live[name]) == hash_tensor(tensor)
            ]
        except Exception:  # the engine's own
            logger.info("delta updates: %s takes no other bits", self.path, exc_info=True)
            return []
        finally:
            copy.release()

    def _rebuilt(self, new: torch.nn.Module, skipped: Set[int]) -> RebuildResult:
        compared = (pair for pair in pairs(self.module, new) if id(pair.new) not in skipped)
        found = [(pair, pair.fingerprint) for pair in compared]
        fingerprints = {pair.path: text for pair, text in found if text is not None}
        kept: list[torch.Tensor] = []
        if any(_is_handle(pair) for pair, _ in found):
            # It might have the address of a tensor that it was made with.
            made = [*new.parameters(), *new.buffers()]
            kept += [tensor.detach() for tensor in made if tensor.numel()]
            computed = self._computes(new)
            if computed is not None:
                fingerprints[_COMPUTED] = computed
        return RebuildResult(
            [d for pair, _ in found for d in self._compare(pair, kept)], fingerprints
        )

    def _compare(self, pair: Pair, kept: list[torch.Tensor]) -> Iterator[Difference]:
        if pair.is_tensor:
            for one in tensor_differences(pair.path, pair.live, pair.new):
                yield replace(one, place=pair.place)
        elif not pair.is_same:
            check_replaceable(pair)
            if any(tensor.device.type != "cpu" for tensor in self.live_tensors()):
                opaque = opaque_part(pair.live, pair.new, pair.path) or pair.path
                raise RebuildError(f"it keeps {opaque}, which a captured graph might hold")
            size = self._unprocessed_bytes() if _is_handle(pair) else 0
            elements = self.state.attributes.get(pair.path)
            if elements is None or elements.container is not pair.container:
                elements = AttributeElements(pair.container, pair.key, size)
                self.state.attributes[pair.path] = elements
            new = Replacement(pair.new, kept if _is_handle(pair) else None, size)
            yield Difference(pair.path, elements, new, pair.place)

    def _computes(self, module: torch.nn.Module) -> str | None:
        """Return the hash of what the live module or a copy computes; None if that is unknown."""
        try:
            output = self._probe(module)
        except Exception:
            logger.info("delta updates: %s cannot be tried out", self.path, exc_info=True)
            return None
        return None if output is None else hash_tensor(output)

    def _unprocessed_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.state.weights())

    @contextlib.contextmanager
    def _processing(self) -> Iterator[None]:
        devices = {t.device.index for t in self.live_tensors() if t.device.type == "cuda"}
        with torch.random.fork_rng(sorted(devices)), torch.no_grad(), self._context():
            yield


def _alike(one: torch.Tensor, kept: torch.Tensor) -> bool:
    """Return whether a tensor has the layout of an unprocessed one, which can be on the host."""
    return layout(one)[1:] == layout(kept)[1:]


def _is_handle(pair: Pair) -> bool:
    """Return whether a new object might stand for something outside of Python, as addresses do."""
    return not (pair.is_tensor or pair.is_same or isinstance(pair.new, _NO_HANDLES))
