"""Prove that an engine's function recomputes the tensors that the engine derives from weights.

Before anything is served, each function is run on the live modules:

1. on the weights as they are: every derived tensor must come out as it is, bit for bit, and
   all else must stay unchanged (a function that packs the weights themselves is refused);
2. on weights whose every element has other bits, all at once and several times (sign and
   mantissa change, so that magnitudes stay about the same; a NaN or infinity becomes a number):
   every element of a derived tensor must change in some round, unless its bits are zero (padding).
   This shows that the function reads the live weights, no copy of them, and leaves nothing out;
3. on the old weights again: the old bits must come back, so the result depends on the weights
   alone, not on what was there before.

A function that reads one weight live and its own copy of another passes. Varied alone, such a
weight looks like one that the derived tensors do not depend on, and of these a module has many (the
output projection of an attention layer, the input scale of a quantised one).

The bits of one recomputation's weights at a time are kept in host memory, and restored whatever
happens. At the end the whole model is compared with what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from engine_ext.kernels import bits_of
from engine_ext.model import (
    ModelStateGuard,
    StorageIndex,
    TracingError,
    address_range,
    attached_tensors,
    is_cache,
    layout,
    location,
    reachable_tensors,
)
from engine_ext.placement import Placement
from engine_ext.startup.derived.find import Derived
from engine_ext.startup.derived.recompute import Recomputation, Recomputed

# Bits of the mantissa. Other dtypes are refused, as it is not known which bits can change: integers
# might be indices or codes.
_MANTISSA: Final[dict[torch.dtype, int]] = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}
# In one round about one quantised element in eight keeps its code; a product of two changed factors
# stays the same less often. If all elements are copies, one round is enough.
_ROUNDS: Final = 16


class _Unproven(Exception):
    """Why a function's result cannot be relied on."""


def prove(
    model: torch.nn.Module,
    placement: Placement,
    derived: Iterable[Derived],
    recomputations: Iterable[Recomputation],
) -> tuple[list[Recomputed], dict[str, str]]:
    """Prove which derived tensors the engine's functions recompute.

    Args:
        model: the loaded model, in serving state, with no request running. Every bit, object and
            address is restored.
        recomputations: declared by the adapter; those without derived tensors are not run.

    Returns:
        The proven recomputations, and why the others are not, by path of the derived tensor.
        Derived tensors on no recomputation's modules are in neither.

    Raises:
        TracingError: a function changed the model in a way that could not be undone; the model
            must not be served.
    """
    derived_by = [(one, [d for d in derived if _within(d.module, one)]) for one in recomputations]
    if not any(found for _, found in derived_by):
        return [], {}
    guard = ModelStateGuard(model, bits=True)
    index = StorageIndex(model)
    covered = {s.live.name for placed in placement.values() for s in placed.segments}
    proven: list[Recomputed] = []
    reasons: dict[str, str] = {}
    for one, found in derived_by:
        try:
            if found:
                proven.append(_Trial(model, index, covered, one, found).prove())
        except Exception as error:
            kind = "" if isinstance(error, _Unproven) else f"{type(error).__name__}: "
            reasons.update({d.path: f"{kind}{error}" for d in found})
    try:
        guard.restore()
        guard.verify()
    except Exception as error:
        raise TracingError(f"trying the functions for recomputed tensors: {error}") from error
    return proven, reasons


def _within(path: str, recomputation: Recomputation) -> bool:
    return any(not m or f"{path}.".startswith(f"{m}.") for m in recomputation.modules)


class _Trial:
    """One recomputation, run on the live modules to prove it."""

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
        self._guards = [ModelStateGuard(module, bits=False) for module in self._modules.values()]
        self._below = {
            _join(path, name): module
            for path, top in self._modules.items()
            for name, module in top.named_modules()
        }
        self._attached = {tensor.path: tensor for tensor in attached_tensors(self._below)}
        # The covered live tensors that the derived ones might be computed from.
        names = {name for d in derived for name in d.weights}
        for attached in self._attached.values():
            names |= {entry.name for entry in index.holding(attached.tensor)} & covered
        self._weights = [index.by_name[name] for name in sorted(names)]
        self._before = self._tensors()
        self._paths = set(self._before)
        self._before.update({entry.name: entry.tensor.data for entry in self._weights})
        self._saved: dict[str, torch.Tensor] = {}
        copies: dict[object, torch.Tensor] = {}
        for name, tensor in self._before.items():
            if (key := location(tensor)) not in copies:
                copies[key] = bits_of(tensor).cpu().clone()
            self._saved[name] = copies[key]
        # The weights and their views, by every name: they change with the weights by themselves.
        self._weight_views = {n for n, t in self._before.items() if self._shares_weights(t)}

    def prove(self) -> Recomputed:
        """Run the steps of the proof, and restore the modules; raises _Unproven if a step fails."""
        self._check_dtypes()
        try:
            self._expect_unchanged("on the weights as they are")
            self._expect_changed()
            self._expect_unchanged("on the old weights after others")
        finally:
            for guard in self._guards:
                guard.restore()
            for name, tensor in self._before.items():
                if not self._is_saved(name, tensor):
                    bits_of(tensor).copy_(self._saved[name])
        names = frozenset(entry.name for entry in self._weights)
        derived = [self._attached[path] for path in self._derived]
        return Recomputed(self._recomputation.run, derived, self._below, names)

    def _check_dtypes(self) -> None:
        """Refuse tensors that the proof does not work for, before anything is run."""
        for path in self._derived:
            if path not in self._attached:
                raise _Unproven(f"{path} is not a plain attribute of its module")
            if path in self._weight_views:
                raise _Unproven(f"{path} shares memory with a weight")
        if not self._weights:
            raise _Unproven("no weight is known on or around its modules")
        for entry in self._weights:
            if entry.tensor.dtype not in _MANTISSA:
                raise _Unproven(
                    f"{entry.name} is {entry.tensor.dtype}, whose bits cannot be varied to test "
                    "the function"
                )

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors reachable from the modules now, without caches, by path."""
        return {
            _join(top, path, name): tensor.data
            for top, module in self._modules.items()
            for path, _, name, tensor in reachable_tensors(module)
            if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel()
            if not is_cache(name)
        }

    def _run(self) -> dict[str, torch.Tensor]:
        """Run the engine's function; return the tensors it leaves. Objects are restored."""
        try:
            with torch.no_grad():
                self._recomputation.run()
            found = self._tensors()
        finally:
            for guard in self._guards:
                guard.restore()
        other = sorted((self._paths - found.keys()) | (found.keys() - self._paths))
        if other:
            raise _Unproven(f"it adds or removes {', '.join(other)}")
        for name, tensor in found.items():
            if layout(tensor) != layout(self._before[name]):
                raise _Unproven(f"it gives {name} another layout")
        return found

    def _expect_unchanged(self, when: str) -> None:
        found = self._run()
        now = {**{e.name: e.tensor.data for e in self._weights}, **found}
        wrong = sorted(name for name, tensor in now.items() if not self._is_saved(name, tensor))
        if wrong:
            raise _Unproven(f"it changes {', '.join(wrong)} {when}")

    def _expect_changed(self) -> None:
        """Change the weights until every element of the derived tensors has changed."""
        random: dict[torch.device, torch.Generator] = {}
        same = {path: self._saved[path] != 0 for path in self._derived}
        zero = [path for path, others in same.items() if not bool(others.any())]
        if zero:
            raise _Unproven(f"{', '.join(zero)} is zero, so no change would be seen")
        for _ in range(_ROUNDS):
            for entry in self._weights:
                memory = bits_of(entry.tensor.data)
                if memory.device not in random:
                    random[memory.device] = torch.Generator(memory.device).manual_seed(0)
                saved = self._saved[entry.name].to(memory.device)
                memory.copy_(varied(saved, entry.tensor.dtype, random[memory.device]))
            found = self._run()
            for name in found.keys() - self._weight_views - same.keys():
                if not self._is_saved(name, found[name]):
                    raise _Unproven(f"it changes {name} with the weights")
            for path, unchanged in same.items():
                now = bits_of(found[path])
                unchanged &= (now == self._saved[path].to(now.device)).cpu()
            if not any(bool(unchanged.any()) for unchanged in same.values()):
                break
        for entry in self._weights:
            bits_of(entry.tensor.data).copy_(self._saved[entry.name])
        stays = [path for path, unchanged in same.items() if bool(unchanged.any())]
        if stays:
            raise _Unproven(f"with other weights it leaves parts of {', '.join(stays)} unchanged")

    def _shares_weights(self, tensor: torch.Tensor) -> bool:
        start, end = address_range(tensor)
        return any(start < entry.end and entry.start < end for entry in self._weights)

    def _is_saved(self, name: str, tensor: torch.Tensor) -> bool:
        bits = bits_of(tensor)
        return torch.equal(bits, self._saved[name].to(bits.device))


def _join(*path: str) -> str:
    return ".".join(part for part in path if part)


def varied(saved: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return other bits for every element: another mantissa or sign, and always a finite number.

    `saved` holds the old bits, integers of any shape, of numbers of the floating-point `dtype`. The
    result has its dtype, shape and device, which is also that of `generator`: a host takes minutes
    for the weights of 61 layers. Temporaries take some 16 bytes per element.
    """
    width = 8 * saved.element_size()
    sign = 1 << (width - 1) if saved.dtype == torch.uint8 else -(1 << (width - 1))
    info = torch.iinfo(saved.dtype)
    mask = torch.randint(
        *(info.min, info.max, saved.shape),
        generator=generator,
        dtype=saved.dtype,
        device=saved.device,
    )
    mask &= sign | ((1 << _MANTISSA[dtype]) - 1)
    mask[mask == 0] = 1
    one = bits_of(torch.ones((), dtype=dtype, device=saved.device))
    others = torch.where(_is_finite(saved, dtype), saved, one) ^ mask
    return torch.where(_is_finite(others, dtype), others, saved ^ sign)


def _is_finite(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = bits.view(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return wide.isfinite()
