"""Find what post-load processing computes from weights and keeps as something else than a tensor.

That can be a number, for kernels that take no tensor, or an object that shows no parts. It would
not follow a write to the weights. The processing runs on copies with several payloads: what it
keeps of one of them and not of another depends on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from engine_ext.model import reachable_leaves, same_leaf
from engine_ext.startup.permuted.index_probe import IndexProbe

_MISSING: Final = object()


def kept_values(
    parameters: Mapping[str, torch.Tensor],
    process: Callable[[dict[str, torch.Tensor]], torch.nn.Module],
) -> list[str]:
    """Return the paths of what processing computes from a module's parameters, other than tensors.

    Args:
        process: runs the processing on a copy of the module with these parameters, and returns it.
            The copy is dropped before the next call.
    """
    known: dict[str, Any] | None = None
    different: set[str] = set()
    for payload in _payloads(parameters):
        try:
            module = process(payload)
        except Exception:
            continue  # it keeps nothing of what it fails on
        found = reachable_leaves(module)
        if known is None:
            known = found
            continue
        different |= {
            path
            for path in known.keys() | found.keys()
            if not same_leaf(known.get(path, _MISSING), found.get(path, _MISSING))
        }
    return sorted(different)


def _payloads(parameters: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random bits, their complement, zeros, half of what was loaded, and what was loaded.

    Random bits have NaN in them, and the processing might compute nothing but NaN from it.
    """
    probes = {n: IndexProbe(tensor, seed) for seed, (n, tensor) in enumerate(parameters.items())}
    for flip in (False, True):
        yield {name: probe.payload(flip) for name, probe in probes.items()}
    loaded = {name: tensor.detach() for name, tensor in parameters.items()}
    yield {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
    yield {name: _half(tensor) for name, tensor in loaded.items()}
    yield {name: tensor.clone() for name, tensor in loaded.items()}


def _half(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    return (tensor.float() / 2).to(tensor.dtype)
