"""Rebuild what the engine's loader computes from one checkpoint tensor.

Some loaders do not copy a tensor but store what they compute from it (Mamba's ``A`` is
``-exp(A_log)``), or put other memory in place of a parameter. The unprocessed weight is then
the checkpoint tensor itself, whole on every rank, and a rebuild runs the loader on copies of the
parameters that it writes to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

import torch

from engine_ext.model import LiveTensor, StorageIndex, hash_memory, layout
from engine_ext.placement import Placed, Placement, Segment, flat_bits
from engine_ext.startup.recomputed.compare import RebuildError
from engine_ext.startup.recomputed.rebuild import (
    Context,
    Difference,
    Rebuild,
    RebuildResult,
    tensor_differences,
)
from engine_ext.startup.recomputed.unprocessed_model import with_modules
from engine_ext.startup.recomputed.unprocessed_modules import Change
from engine_ext.startup.trace import LoaderDryRun, LoadWeights

_TENSOR = "tensor"


class LoaderRebuild(Rebuild):
    """The live tensors that the loader computes from one checkpoint tensor.

    Args:
        model: the unprocessed one that the loader is traced on, or the model itself.
        loader: returns the loader of a copy of it.
        tensor: the checkpoint tensor, contiguous, in host memory.
        written: names of the live parameters that the loader writes to, all that they have.

    The attributes are those of `Rebuild`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loader: Callable[[torch.nn.Module], LoadWeights],
        context: Context,
        name: str,
        tensor: torch.Tensor,
        written: Iterable[str],
    ) -> None:
        self.path = f"loading {name}"
        self.names = {f"{self.path}.{_TENSOR}": _TENSOR}
        self.numel = tensor.numel()
        self.computed = sorted(written)
        self.proven = {}
        self._model, self._loader, self._context = model, loader, context
        self._name = name
        self._tensor = tensor

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint tensor."""
        yield _TENSOR, self._tensor

    def segment(self) -> Segment:
        """Return the place of the whole checkpoint tensor."""
        size = self._tensor.nbytes
        start = self._tensor.data_ptr()
        live = LiveTensor(f"{self.path}.{_TENSOR}", self._tensor, start, start + size)
        return Segment(live, 0, (1,), (self.numel,), 0, (1,), python_copy=False)

    def rebuild(self, changes: Mapping[str, Iterable[Change]]) -> RebuildResult:
        """See `Rebuild.rebuild`."""
        unknown = sorted(changes.keys() - {_TENSOR})
        if unknown:
            raise RebuildError(f"{self.path} reads no {', '.join(unknown)}")
        tensor = self._tensor.clone()
        for change in changes.get(_TENSOR, ()):
            change.elements.within(tensor).put(change.new)
        differences: list[Difference] = []
        fingerprints: dict[str, str] = {}
        for name, (original, result) in self._loaded(tensor, torch.clone).items():
            differences += tensor_differences(name, original, result)
            fingerprints[name] = hash_memory(result) if result.numel() else ""
        return RebuildResult(differences, fingerprints)

    def check_old_values(self) -> None:
        """See `Rebuild.check_old_values`.

        The loader is given parameters of very large and very small numbers, and then the other way
        round, with a tensor of zeros. It can leave elements as they are (padding), the same ones
        both times.
        """
        first = self._loaded(self._tensor.clone(), _extremes)
        second = self._loaded(torch.zeros_like(self._tensor), lambda t: _extremes(t, swap=True))
        for name, (original, result) in first.items():
            live, now, other = flat_bits(original), flat_bits(result), flat_bits(second[name][1])
            start = flat_bits(_extremes(original))
            left = now == start
            left_again = other == flat_bits(_extremes(original, swap=True))
            if bool(((now != live) & ~left | (left != left_again) & (start != live)).any()):
                raise RebuildError(f"{name} depends on what it held before")

    def _loaded(
        self, tensor: torch.Tensor, start: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Load the checkpoint tensor into copies of the parameters.

        Args:
            start: returns what the copy of a parameter holds before.

        Returns:
            Each parameter with what the loader has made of its copy, by its first name.

        Raises:
            RebuildError: the loader makes something that cannot take the parameters' place.
        """
        originals = {name: self._model.get_parameter(name) for name in self.computed}
        copies = {id(original): _copied(original, start) for original in originals.values()}
        copy = with_modules(self._model, _holders(self._model, copies))
        with torch.no_grad(), self._context():
            self._loader(copy)(iter([(self._name, tensor)]))
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        names: dict[int, str] = {}
        for name, original in originals.items():
            result = copy.get_parameter(name)
            first = names.setdefault(id(original), name)
            if first == name:
                found[name] = original, result
            elif found[first][1] is not result:
                raise RebuildError(f"the loader parts {name} from {first}")
            if layout(result) != layout(original):
                raise RebuildError(f"the loader gives {name} another layout")
        return found

    def is_intact(self, expected: Mapping[str, str]) -> bool:
        """See `Rebuild.is_intact`."""
        found = self.rebuild({})
        return not found.differences and not found.unlike(expected)

    def shares(self, name: str) -> bool:
        """Return False: the loader is given nothing but the tensor."""
        return False

    def shared_tensors(self) -> Sequence[torch.Tensor]:
        """Return none: the loader is only given copies."""
        return ()

    def contains(self, name: str) -> bool:
        """Return False: it is no module."""
        return False


def _extremes(tensor: torch.Tensor, *, swap: bool = False) -> torch.Tensor:
    """Return a tensor alike with random very large and very small numbers, or these swapped."""
    info = (torch.finfo if tensor.is_floating_point() else torch.iinfo)(tensor.dtype)
    # No infinity, nor the largest number: a loader might clamp to these.
    bounds = [torch.full((), x * 0.75).to(tensor.dtype) for x in (info.min, info.max)]
    small, large = (flat_bits(bound).to(tensor.device) for bound in bounds)
    found = tensor.detach().clone()
    memory = flat_bits(found)
    chosen = torch.rand(memory.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    memory.copy_(torch.where(chosen.to(memory.device) ^ swap, small, large))
    return found


def _copied(
    original: torch.nn.Parameter, start: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Parameter:
    """Return a parameter alike in everything but its memory, which holds what `start` returns."""
    parameter = torch.nn.Parameter(start(original.detach()), requires_grad=False)
    parameter.__class__ = type(original)
    vars(parameter).update(vars(original))
    return parameter


def _holders(
    model: torch.nn.Module, copies: Mapping[int, torch.nn.Parameter]
) -> dict[int, torch.nn.Module]:
    """Return copies of the modules that hold some parameters, with copies of those, by `id`."""
    found: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        held = {n: copies[id(p)] for n, p in module._parameters.items() if id(p) in copies}
        if held:
            copy = found[id(module)] = object.__new__(type(module))
            vars(copy).update(vars(module), _parameters={**module._parameters, **held})
    return found


def _overlapping(index: StorageIndex) -> set[str]:
    """Return the live tensors that share memory with another one in part, under every name."""
    found: set[str] = set()
    furthest: LiveTensor | None = None
    for entry in index.entries:  # by address
        if furthest is not None and entry.start < furthest.end:
            found.update([entry.name, *entry.aliases, furthest.name, *furthest.aliases])
        if furthest is None or entry.end > furthest.end:
            furthest = entry
    return found


def rebuild_by_loading(
    dry_run: LoaderDryRun,
    loader: Callable[[torch.nn.Module], LoadWeights],
    context: Context,
    placement: Placement,
    checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    *,
    names: Iterable[str],
    reserve: Callable[[int], bool],
    rebuilt: Iterable[str],
    processed: AbstractSet[str],
) -> list[LoaderRebuild]:
    """Find the tensors that cannot be followed, but can be loaded again.

    Args:
        dry_run: of the model that the loader knows.
        loader: returns the loader of a copy of that.
        placement: as traced by it; the tensors found get a segment in their own copy and are
            `UNJUDGED` again.
        checkpoint: reads the loaded checkpoint.
        names: the tensors that could not be followed when the loader was traced.
        reserve: takes a number of bytes for a copy; returns whether there is room.
        rebuilt: paths of the modules that are rebuilt; what is written there is left out.
        processed: live tensors that something is done to after loading, which are left out, too.
    """
    apart_from = {*processed, *_overlapping(dry_run.index)}
    found: dict[str, frozenset[str]] = {}
    for name in names:
        spec = placement[name].spec
        outputs = dry_run.written_alone(spec)
        inside = any(one.startswith(f"{path}.") for path in rebuilt for one in outputs)
        apart = not inside and outputs.isdisjoint(apart_from)
        if outputs and apart and reserve(spec.numel * spec.dtype.itemsize):
            found[name] = outputs
    others = [s.live.name for n, p in placement.items() if n not in found for s in p.segments]
    taken = Counter([*others, *chain.from_iterable(found.values())])
    alone = {n: outputs for n, outputs in found.items() if all(taken[one] == 1 for one in outputs)}
    rebuilds = []
    for name, tensor in checkpoint() if alone else ():
        if name in alone:
            kept = tensor.detach().contiguous().clone()
            one = LoaderRebuild(dry_run.model, loader, context, name, kept, alone[name])
            placement[name] = Placed(placement[name].spec, [one.segment()])
            rebuilds.append(one)
    return rebuilds
