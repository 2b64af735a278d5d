"""Gather and scatter of single elements, as integers: the only code that writes a live weight.

On the CPU the loops are compiled by numba where it is installed (every engine brings it), without
the GIL; otherwise, and on other devices, they are PyTorch's index operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray

from engine_ext.dtypes import torch_bits_dtype

_Kernel = Callable[[Any, Any, Any], None]


def _gather(live: NDArray[Any], offsets: NDArray[Any], out: NDArray[Any]) -> None:
    for k in range(offsets.size):
        out[k] = live[offsets[k]]


def _scatter(live: NDArray[Any], offsets: NDArray[Any], values: NDArray[Any]) -> None:
    for k in range(offsets.size):
        live[offsets[k]] = values[k]


@cache
def _compiled() -> tuple[_Kernel, _Kernel] | None:
    """The compiled loops, or None without numba, which is not a core dependency.

    numba is imported late: while vLLM starts a worker it looks into every object of every loaded
    module, and trips over one of numba's.
    """
    try:
        import numba
    except ImportError:
        return None
    compile_loop = numba.njit(nogil=True, cache=True)
    return compile_loop(_gather), compile_loop(_scatter)


def bits_of(live: torch.Tensor) -> torch.Tensor:
    """A 1-D live tensor as integers of the same width; writes go through."""
    return live.view(torch_bits_dtype(live.dtype))


def gather(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Elements of a 1-D integer tensor.

    Args:
        flat: [n], live memory as integers.
        offsets: int32 or int64 [k] on the same device, each below n.

    Returns:
        [k], dtype of `flat`, a copy on the same device.
    """
    loops = _compiled() if flat.device.type == "cpu" else None
    if loops is not None:
        out = torch.empty(offsets.shape, dtype=flat.dtype)
        loops[0](flat.numpy(), offsets.numpy(), out.numpy())
        return out
    return flat.index_select(0, offsets)


def scatter(flat: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite elements of a 1-D integer tensor.

    Args:
        flat: [n], live memory as integers.
        offsets: int32 or int64 [k] on the same device, each below n, unique.
        values: [k], dtype and device of `flat`.
    """
    loops = _compiled() if flat.device.type == "cpu" else None
    if loops is not None:
        loops[1](flat.numpy(), offsets.numpy(), values.numpy())
    else:
        flat.index_copy_(0, offsets.to(torch.int64), values)


def warm_up() -> None:
    """Compile the loops now, so that the first commit does not wait for it."""
    for width in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for index in (torch.int32, torch.int64):
            flat = torch.zeros(1, dtype=width)
            offsets = torch.zeros(1, dtype=index)
            scatter(flat, offsets, gather(flat, offsets))
