"""The port of a rebuild: what an engine has computed from weights is computed again.

`ModuleRebuild` repeats the post-load processing of a module, `LoaderRebuild` the loading of one
checkpoint tensor. The proof at start-up and the sync know nothing else of either than this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from engine_ext.kernels import host_bits, warm_up
from engine_ext.model import extent
from engine_ext.placement import DeviceElements, HostElements, LiveElements, flat_bits
from engine_ext.startup.derived import varied
from engine_ext.startup.recomputed.compare import Place, RebuildError
from engine_ext.startup.recomputed.unprocessed_modules import Change

# Elements compared at a time, in host memory or on a device.
_CHUNK: Final = 1 << 20
_DEVICE_CHUNK: Final = 1 << 20

Context = Callable[[], contextlib.AbstractContextManager[Any]]

Probe = Callable[[torch.nn.Module], torch.Tensor | None]
"""Return what a live module computes from an input, the same every time; None if unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Elements of live memory, or an attribute, and what a rebuild makes of them.

    Attributes:
        path: from the module, or the name of a live tensor.
        place: of a tensor or attribute that need not stay there; None for a parameter.
    """

    path: str
    elements: LiveElements
    new: Any
    place: Place | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RebuildResult:
    """What a rebuild gives.

    Attributes:
        differences: from live memory.
        fingerprints: of every tensor and value, by path, whether it differs or not. Handles count
            by what the module computes with them.
    """

    differences: list[Difference]
    fingerprints: dict[str, str]

    def unlike(self, expected: Mapping[str, str]) -> list[str]:
        """Return the paths whose fingerprints are not as expected."""
        return sorted(p for p, text in expected.items() if self.fingerprints.get(p) != text)


class Rebuild(Protocol):
    """Something that the engine has computed from weights, and how it is computed again.

    - It reads its unprocessed weights (`weights`). Syncs write to these.
    - `rebuild` returns what it would write, and itself writes nothing: neither to live memory nor
      to the unprocessed weights.
    - Rebuilt from the same weights it gives the same, as far as `proven` says.
    - A write of its differences gives what a fresh engine makes of the weights.

    `ModuleRebuild` and `LoaderRebuild` inherit from it.

    Attributes:
        path: of the module in the model; else what is rebuilt, for messages.
        module: the live module; None if it is none.
        names: the unprocessed weights, by the names by which the loader is seen to write to them.
        in_place: those that are live memory.
        computed: names of live tensors that the loader writes to in no other way.
        numel: elements of the unprocessed weights.
        proven: the fingerprints that rebuilding it gave at start-up, of what comes out alike every
            time; empty until it is proven.
    """

    path: str
    module: torch.nn.Module | None = None
    names: dict[str, str]
    in_place: Set[str] = frozenset()
    computed: Sequence[str] = ()
    numel: int
    proven: dict[str, str]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the unprocessed weights, by name."""

    def rebuild(self, changes: Mapping[str, Iterable[Change]]) -> RebuildResult:
        """Return what live memory must hold with other unprocessed weights. Nothing is written.

        Takes the memory of a copy of what is rebuilt while it runs.

        Args:
            changes: of the unprocessed weights, by their names.

        Raises:
            RebuildError: it has no such weight, or something else than before comes out.
            Exception: the engine's own.
        """

    def is_intact(self, expected: Mapping[str, str]) -> bool:
        """Return whether live memory is what comes out of the unprocessed weights.

        Args:
            expected: fingerprints that must come out.
        """

    def check_old_values(self) -> None:
        """Check that what comes out does not depend on what live memory holds.

        Raises:
            RebuildError: it does.
            Exception: the engine's own.
        """

    def shares(self, name: str) -> bool:
        """Return whether an unprocessed weight can be read by another way than from its copy."""

    def shared_tensors(self) -> Sequence[torch.Tensor]:
        """Return the live tensors that the copies use as they are, which a rebuild must not change.

        They are other than the unprocessed weights.
        """

    def keeps(self, name: str) -> bool:
        """Return whether other bits in an unprocessed weight must give something else."""
        return True

    def contains(self, name: str) -> bool:
        """Return whether a tensor, given by its name in the model, is in the module."""


def tensor_differences(path: str, live: torch.Tensor, new: torch.Tensor) -> Iterator[Difference]:
    """Yield the elements of a live tensor whose bits differ in another one of its layout.

    Raises:
        RebuildError: there are gaps between its elements.
    """
    if extent(live) != live.numel():
        raise RebuildError(f"{path} has gaps between its elements")
    memory, other = flat_bits(live), flat_bits(new)
    narrow = memory.numel() < 1 << 31
    if memory.device.type != "cpu":
        # Offsets are narrow: they are kept until the next sync.
        yield from _on_device(path, memory, other, torch.int32 if narrow else torch.int64)
        return
    of_live, of_new = host_bits(memory), host_bits(other)
    dtype = np.int32 if narrow else np.int64
    # Start-up comes here, too: the pause of the first sync would otherwise wait for the compiler.
    warm_up(of_live.itemsize, np.dtype(dtype).itemsize)
    for start in range(0, len(of_live), _CHUNK):
        part = slice(start, start + _CHUNK)
        offsets = np.flatnonzero(of_live[part] != of_new[part])
        if len(offsets):
            offsets = (offsets + start).astype(dtype)
            yield Difference(path, HostElements(of_live, offsets), of_new[offsets])


def _on_device(
    path: str, memory: torch.Tensor, other: torch.Tensor, dtype: torch.dtype
) -> Iterator[Difference]:
    """Yield the differences of a chunk at a time, with offsets of a type.

    PyTorch finds and reads the places in int64: 16 bytes for each element that differs.
    """
    for start in range(0, memory.numel(), _DEVICE_CHUNK):
        part = slice(start, start + _DEVICE_CHUNK)
        found = (memory[part] != other[part]).nonzero().view(-1)
        if len(found):
            new = other[part][found]
            yield Difference(path, DeviceElements(memory, found.to(dtype).add_(start)), new)


class Perturbation:
    """A change of a whole tensor, see `engine_ext.startup.recomputed.rebuild.Change`.

    Floats get another mantissa or sign, integers other bits.
    """

    new = 0  # seed

    @property
    def elements(self) -> Perturbation:
        return self

    def within(self, tensor: torch.Tensor) -> _Filler:
        return _Filler(tensor)


@dataclass(frozen=True, slots=True)
class _Filler:
    tensor: torch.Tensor

    def put(self, seed: int) -> None:
        bits = flat_bits(self.tensor)
        device = bits.device
        generator = torch.Generator(device).manual_seed(seed)
        if self.tensor.is_floating_point():
            bits.copy_(varied(bits, self.tensor.dtype, generator))
        else:
            top = torch.iinfo(bits.dtype).max
            bits ^= torch.randint(
                *(1, top, bits.shape), generator=generator, dtype=bits.dtype, device=device
            )
