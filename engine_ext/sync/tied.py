"""Check that a sync leaves tied tensors with the same values.

The engine has one memory for both (an embedding and the output head), so that it can hold two
values of an element only if they are equal. A fresh engine would drop one of them, or not tie them
at all, so that a sync with different ones is refused.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.errors import NotUpdatable
from engine_ext.placement import DeviceElements, HostElements, WholeBox
from engine_ext.sync.staged import StagedParam, StagedPart, Write


def check_tied(
    staged: Sequence[StagedPart], tied: Mapping[str, str], aliases: Container[str] = ()
) -> None:
    """Check that both tensors of every pair would have the same values on this rank.

    Args:
        staged: all parts of a sync; no two of their params write to the same element of a tensor.
        tied: the pairs, by name.
        aliases: those names that the checkpoint does not hold. A trainer need not send them.

    Raises:
        NotUpdatable: names both tensors. Nothing was written.
    """
    if not tied:
        return
    sent: dict[str, list[StagedParam]] = {}
    for part in staged:
        for param in (*part.params, *part.compared):
            sent.setdefault(param.name, []).append(param)
    for name, other in tied.items():
        one, its = sent.get(name, []), sent.get(other, [])
        if not one and name in aliases:
            continue
        if (one or its) and not _are_equal(_writes(one), _writes(its)):
            raise tied_differ(name, other)


def tied_differ(name: str, other: str) -> NotUpdatable:
    """Return the error that a sync would give tied tensors different values."""
    return NotUpdatable(
        f"{name} and {other} would differ, but this engine ties them: it has one memory for both; "
        "send the same values for both, or start the engine from a checkpoint whose config has "
        "tie_word_embeddings=false",
        tensor=name,
        tensors=sorted((name, other)),
    )


def _writes(params: Sequence[StagedParam]) -> list[Write]:
    return [write for param in params for write in param.writes]


def _are_equal(one: Sequence[Write], other: Sequence[Write]) -> bool:
    """Return whether two tensors of the same values have the same after these writes to each."""
    whole = [write for write in (*one, *other) if isinstance(write.elements, WholeBox)]
    if whole:
        return len(whole) == len(one) + len(other) == 2 * len(one) and all(
            _same_bits(a.new, b.new) for a, b in zip(one, other, strict=True)
        )
    if len(one) == len(other) and all(
        np.array_equal(_offsets(a), _offsets(b)) and np.array_equal(_host(a.new), _host(b.new))
        for a, b in zip(one, other, strict=True)
    ):
        return True
    return all(map(np.array_equal, _changes(one), _changes(other)))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())


def _changes(writes: Sequence[Write]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the offsets and new bits of the elements that writes change, by offset."""
    offsets, bits = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for write in writes:
        old = _host(write.elements.read() if write.old is None else write.old)
        new, places = _host(write.new), _offsets(write)
        differs = old != new
        offsets.append(places[differs].astype(np.int64))
        bits.append(new[differs].astype(np.uint64))
    places = np.concatenate(offsets)
    order = np.argsort(places)
    return places[order], np.concatenate(bits)[order]


def _offsets(write: Write) -> NDArray[Any]:
    assert isinstance(write.elements, (HostElements, DeviceElements))
    return _host(write.elements.offsets)


def _host(values: Any) -> NDArray[Any]:
    """Return values as a flat array of unsigned integers in host memory."""
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    flat: NDArray[Any] = array.reshape(-1)
    return flat.view(f"u{flat.itemsize}")
