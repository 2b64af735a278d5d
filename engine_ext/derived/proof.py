"""The proof that an engine's function recomputes what the engine keeps beside its weights.

Before anything is served, each function is run on the live modules:

1. on the weights as they are: every derived tensor must come out as it is, bit for bit, and
   nothing else may change (a function that packs the weights themselves is none);
2. on weights of which, all at once, every element has other bits (the sign and the mantissa, so
   that numbers stay about as large as they were; what is none becomes one), several times: every
   element of a derived tensor must change some time, unless its bits are zero (padding). So the
   function reads the live weights and no copy, and does not leave anything out;
3. on the old weights again: the old bits must come back, so that the outcome depends on the
   weights alone and not on what was there before.

The weights' bits are kept in host memory meanwhile, those of one recomputation's modules at a
time, and put back whatever happens. At the end the whole model is compared with what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from engine_ext.derived.find import Derived
from engine_ext.derived.recompute import Recomputation, Recomputed, layout
from engine_ext.kernels.gather_scatter import bits_of
from engine_ext.model.constants import is_cache
from engine_ext.model.module_walk import hanging
from engine_ext.model.state_guard import ModelStateGuard, TracingError, held_tensors, place
from engine_ext.model.storage_index import LiveTensor, StorageIndex, extent
from engine_ext.placement.segments import Placement

# Bits of the mantissa. Of other dtypes it is not known which bits may be changed: integers may be
# indices, or codes.
_MANTISSA: Final[dict[torch.dtype, int]] = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}
# A quantised element keeps its code under a change in one case of eight or so; a product of two
# changed factors is the same more seldom. Where all elements are copies, one round is enough.
_ROUNDS: Final = 16


class _Unproven(Exception):
    """Why a function's outcome cannot be relied on."""


def prove(
    model: torch.nn.Module,
    placement: Placement,
    derived: Iterable[Derived],
    recomputations: Iterable[Recomputation],
) -> tuple[list[Recomputed], dict[str, str]]:
    """Find out which derived tensors the engine's functions recompute.

    Args:
        model: the loaded model, in serving state, with no request running. It comes out with every
            bit, object and address as it was.
        placement: of the whole checkpoint.
        derived: as of `find_derived`.
        recomputations: what the adapter gives; those without derived tensors are not run.

    Returns:
        The proven ones, and for derived tensors of the others, by path, why not. Derived tensors
        on no recomputation's modules are in neither.

    Raises:
        TracingError: some function changed the model elsewhere, where it was not put back.
    """
    chosen = [
        (one, found)
        for one in recomputations
        if (found := [d for d in derived if _within(d.module, one.modules)])
    ]
    if not chosen:
        return [], {}
    untouched = ModelStateGuard(model, bits=True)
    index = StorageIndex(model)
    covered = {s.live.name for placed in placement.values() for s in placed.segments}
    proven: list[Recomputed] = []
    reasons: dict[str, str] = {}
    for one, found in chosen:
        try:
            proven.append(_Trial(model, index, covered, one, found).prove())
        except Exception as error:
            text = (
                str(error) if isinstance(error, _Unproven) else f"{type(error).__name__}: {error}"
            )
            reasons.update({d.path: text for d in found})
    untouched.put_back()
    try:
        untouched.require()
    except TracingError as error:
        raise TracingError(f"trying what recomputes derived tensors: {error}") from error
    return proven, reasons


def _within(path: str, modules: Iterable[str]) -> bool:
    return any(not m or path == m or path.startswith(f"{m}.") for m in modules)


class _Trial:
    """One recomputation, tried on the live modules."""

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        covered: set[str],
        recomputation: Recomputation,
        derived: Sequence[Derived],
    ) -> None:
        self._recomputation = recomputation
        self._derived = [d.path for d in derived]
        self._modules = {path: model.get_submodule(path) for path in recomputation.modules}
        self._python = [ModelStateGuard(module, bits=False) for module in self._modules.values()]
        self._below = {
            _join(path, name): module
            for path, top in self._modules.items()
            for name, module in top.named_modules()
        }
        self._held = {held.path: held for held in held_tensors(self._below)}
        self._weights = self._sources(index, covered, derived)
        self._before = self._hung()
        self._places = set(self._before)
        self._before.update({entry.name: entry.tensor.data for entry in self._weights})
        self._saved: dict[str, torch.Tensor] = {}
        copies: dict[object, torch.Tensor] = {}
        for name, tensor in self._before.items():
            where = place(tensor)
            if where not in copies:
                copies[where] = bits_of(tensor).cpu().clone()
            self._saved[name] = copies[where]
        # What a change of the weights changes by itself: they and their views, by every name.
        self._moving = {n for n, t in self._before.items() if self._shares_weights(t)}

    def prove(self) -> Recomputed:
        """Go through the steps of the proof; the modules come out as they were.

        Raises:
            _Unproven: one fails.
            Exception: the engine's own.
        """
        self._check_kinds()
        try:
            self._expect_the_same("on the weights as they are")
            self._expect_others()
            self._expect_the_same("on the old weights after others")
        finally:
            self._put_back()
        names = frozenset(entry.name for entry in self._weights)
        derived = [self._held[path] for path in self._derived]
        return Recomputed(self._recomputation.run, derived, self._below, names)

    def _put_back(self) -> None:
        for python in self._python:
            python.put_back()
        for name, tensor in self._before.items():
            if not self._is_saved(name, tensor):
                bits_of(tensor).copy_(self._saved[name])

    def _sources(
        self, index: StorageIndex, covered: set[str], derived: Sequence[Derived]
    ) -> list[LiveTensor]:
        """The covered live tensors that the derived ones may be computed from."""
        names = {name for d in derived for name in d.weights}
        for held in self._held.values():
            names |= {entry.name for entry in index.holding(held.tensor)} & covered
        return [index.by_name[name] for name in sorted(names)]

    def _check_kinds(self) -> None:
        """Refuse what the proof cannot be made for, before anything is run."""
        for path in self._derived:
            if path not in self._held:
                raise _Unproven(f"{path} is no plain attribute of its module")
            if path in self._moving:
                raise _Unproven(f"{path} shares memory with a weight")
        if not self._weights:
            raise _Unproven("no weight is known on or around its modules")
        for entry in self._weights:
            if entry.tensor.dtype not in _MANTISSA:
                raise _Unproven(
                    f"{entry.name} is {entry.tensor.dtype}, and cannot be given other values to "
                    "see it follow"
                )

    def _hung(self) -> dict[str, torch.Tensor]:
        """Every tensor that hangs on the modules, but for caches, by its path, as it is now."""
        return {
            _join(top, path, name): tensor.data
            for top, module in self._modules.items()
            for path, _, name, tensor in hanging(module)
            if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel()
            if not is_cache(name)
        }

    def _run(self) -> dict[str, torch.Tensor]:
        """Run the engine's function; what hangs on the modules then. Objects are put back."""
        try:
            with torch.no_grad():
                self._recomputation.run()
            found = self._hung()
        finally:
            for python in self._python:
                python.put_back()
        other = sorted((self._places - found.keys()) | (found.keys() - self._places))
        if other:
            raise _Unproven(f"it makes or removes {', '.join(other)}")
        for name, tensor in found.items():
            if layout(tensor) != layout(self._before[name]):
                raise _Unproven(f"it gives {name} another layout")
        return found

    def _expect_the_same(self, when: str) -> None:
        found = self._run()
        now = {**{e.name: e.tensor.data for e in self._weights}, **found}
        wrong = sorted(name for name, tensor in now.items() if not self._is_saved(name, tensor))
        if wrong:
            raise _Unproven(f"it changes {', '.join(wrong)} {when}")

    def _expect_others(self) -> None:
        """Change the weights until every element of the derived tensors has changed."""
        generator = torch.Generator().manual_seed(0)
        same = {path: self._saved[path] != 0 for path in self._derived}
        zero = [path for path, others in same.items() if not bool(others.any())]
        if zero:
            raise _Unproven(f"{', '.join(zero)} is zero, so that nothing can be seen to follow")
        for _ in range(_ROUNDS):
            for entry in self._weights:
                bits = _others(self._saved[entry.name], entry.tensor.dtype, generator)
                bits_of(entry.tensor.data).copy_(bits)
            found = self._run()
            for name in found.keys() - self._moving - same.keys():
                if not self._is_saved(name, found[name]):
                    raise _Unproven(f"it changes {name} with the weights")
            for path, unchanged in same.items():
                unchanged &= bits_of(found[path]).cpu() == self._saved[path]
            if not any(bool(unchanged.any()) for unchanged in same.values()):
                break
        for entry in self._weights:
            bits_of(entry.tensor.data).copy_(self._saved[entry.name])
        stays = [path for path, unchanged in same.items() if bool(unchanged.any())]
        if stays:
            raise _Unproven(
                f"with other weights it leaves (parts of) {', '.join(stays)} as they were"
            )

    def _shares_weights(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        end = start + extent(tensor) * tensor.element_size()
        return any(start < entry.end and entry.start < end for entry in self._weights)

    def _is_saved(self, name: str, tensor: torch.Tensor) -> bool:
        return torch.equal(bits_of(tensor).cpu(), self._saved[name])


def _join(*path: str) -> str:
    return ".".join(part for part in path if part)


def _others(saved: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Other bits for every element: another mantissa or sign, and a number in any case.

    Args:
        saved: the old bits, on the CPU.
        dtype: what they are bits of.

    Temporaries take some 16 bytes per element.
    """
    width = 8 * saved.element_size()
    sign = 1 << (width - 1) if saved.dtype == torch.uint8 else -(1 << (width - 1))
    info = torch.iinfo(saved.dtype)
    mask = torch.randint(info.min, info.max, saved.shape, generator=generator, dtype=saved.dtype)
    mask &= sign | ((1 << _MANTISSA[dtype]) - 1)
    mask[mask == 0] = 1
    one = bits_of(torch.ones((), dtype=dtype))
    others = torch.where(_is_number(saved, dtype), saved, one) ^ mask
    return torch.where(_is_number(others, dtype), others, saved ^ sign)


def _is_number(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = bits.view(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return wide.isfinite()
