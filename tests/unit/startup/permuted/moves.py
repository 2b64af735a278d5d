"""What engines do to a parameter after loading that only moves its elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine_ext.startup.permuted.infer import InferredRepacks, infer_repacks

Change = Callable[[torch.Tensor], torch.Tensor]


def of_weight(
    change: Change, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> InferredRepacks:
    """Learn what a processing does to the one parameter of a module."""
    weight = torch.empty(shape, dtype=dtype)
    return infer_repacks({"weight": weight}, lambda probes: {"weight": change(probes["weight"])})


def vnni(weight: torch.Tensor) -> torch.Tensor:
    """Per expert: 16 rows side by side, two columns at a time; the same shape."""
    experts, rows, columns = weight.shape
    tiles = weight.view(experts, rows // 16, 16, columns // 2, 2)
    return tiles.permute(0, 1, 3, 2, 4).contiguous().view(weight.shape)


def rolled(weight: torch.Tensor) -> torch.Tensor:
    """Across the experts: no two of them alike, and none stays."""
    return weight.reshape(-1).roll(5).view(weight.shape)


def in_place(weight: torch.Tensor) -> torch.Tensor:
    weight.copy_(vnni(weight.clone()))
    return weight


def experts_mixed(weight: torch.Tensor) -> torch.Tensor:
    """Each expert stays where it is, but the second is moved in another way."""
    weight = weight.clone()
    weight[1] = weight[1].flip(0)
    return weight


# The move, and how many elements of a [3, 32, 6] parameter the map that repeats should have.
MOVES: Mapping[str, tuple[Change, int]] = {
    "transpose per expert": (lambda w: w.transpose(1, 2).contiguous(), 192),
    "interleave": (vnni, 96),
    "interleave in place": (in_place, 96),
    "two halves swapped": (lambda w: torch.cat([w[:, 16:], w[:, :16]], 1), 192),
    "columns reversed": (lambda w: w.flip(2), 6),
    "pairs swapped": (lambda w: w.view(-1, 2).flip(1).reshape(w.shape), 2),
    "experts reversed": (lambda w: w.flip(0), 576),
    "one expert otherwise": (experts_mixed, 576),
    "across experts": (rolled, 576),
    "in another shape": (lambda w: w.transpose(1, 2).reshape(3, 3, 64), 192),
    "dense but not contiguous": (lambda w: w.flip(2).view(3, 32, 6).transpose(0, 1), 6),
}
