"""Certification: prove a placement by comparing live memory with known checkpoint bytes.

A placement says where the loader wrote each element. It does not prove that the element is still
there: engines repack, transpose and transform weights after loading, sometimes into the same
storage with the same shape. Therefore a tensor can be updated only after every one of its live
elements was compared, bit by bit, with the checkpoint.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine_ext.dtypes import NAME_OF_TORCH, name_of, torch_bits_dtype
from engine_ext.format import Digest, digest_if_equal
from engine_ext.kernels import Bits, bits_of, host_bits, same_device
from engine_ext.placement.ownership import SourceBox, box_of
from engine_ext.placement.repacked import gather_live
from engine_ext.placement.segments import Placed, Placement, Segment, Status

Certified = dict[str, dict[SourceBox, Digest]]
"""The digests of certified elements, by checkpoint tensor and box."""

_PIECE = 1 << 20  # elements that a thread compares and digests at a time
_AHEAD = 64 << 20  # bytes of the checkpoint that can be read ahead of the oldest unjudged tensor


def certify_placement(
    placement: Placement,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
    *,
    moves_known: bool = True,
    threads: int = 1,
) -> Certified:
    """Compare every traced tensor with the checkpoint and set its status.

    The model is only read. Tensors that are contiguous in the checkpoint and in host memory are
    digested in the same pass. A tensor that `checkpoint` does not contain becomes uncertified.

    Args:
        placement: the traced placement; the status of every `UNJUDGED` entry is set.
        checkpoint: (name, tensor) pairs of the checkpoint that the engine loaded.
        moves_known: whether the placement includes everything the engine does after loading. If
            not, a tensor whose elements are all equal is refused, because its bytes are the same
            in any order.
        threads: how many compare.

    Returns:
        The digests that the pass gave, of tensors that are `EXACT`.
    """
    certified: Certified = {}
    waiting: deque[tuple[Placed, torch.Tensor, _Compared]] = deque()
    left = _AHEAD
    seen: set[str] = set()
    twice: set[str] = set()
    with ThreadPoolExecutor(threads, initializer=same_device()) as pool:
        for name, tensor in checkpoint:
            placed = placement.get(name)
            if name in seen:
                twice.add(name)
            if placed is None or placed.status is not Status.UNJUDGED:
                continue
            seen.add(name)
            if not _is_of(placed, tensor, moves_known):
                continue
            source = tensor.detach().contiguous()
            waiting.append((placed, source, _compare(placed, source, pool)))
            left -= source.nbytes
            while left < 0:
                left += waiting[0][1].nbytes
                _judge(*waiting.popleft(), certified)
        for one in waiting:
            _judge(*one, certified)
    for name in twice:
        if placement[name].status is Status.UNCERTIFIED:
            placement[name].reason = (
                "several of the files that the engine reads have it, and the engine does not hold "
                "the bytes of the first; leave one set of files in the folder"
            )
    for placed in placement.values():
        if placed.status is Status.UNJUDGED:
            placed.refuse("its bytes were not among the checkpoint's")
    return certified


def summary(placement: Placement) -> dict[str, int]:
    """Return how many tensors have each status."""
    return dict(Counter(placed.status.value for placed in placement.values()))


def uncertified(placement: Placement) -> dict[str, str]:
    """Return why tensors cannot be updated exactly, by name."""
    return {n: p.reason for n, p in placement.items() if p.status is Status.UNCERTIFIED}


_Pieces = list[Future[Digest | None]]
# The last is whether the pieces are digested.
_Compared = list[tuple[Segment, _Pieces, bool]]


def _is_of(placed: Placed, tensor: torch.Tensor, moves_known: bool) -> bool:
    """Return whether a tensor can prove a placement; mark it if not."""
    if tuple(tensor.shape) != placed.spec.shape or tensor.dtype != placed.spec.dtype:
        placed.refuse("the checkpoint changed while the engine was starting")
        return False
    if tensor.dtype not in NAME_OF_TORCH:
        placed.refuse(f"no delta can have its dtype, {name_of(tensor.dtype)}")
        return False
    if not moves_known and _all_equal(tensor.detach().contiguous()):
        placed.refuse(
            "all its elements are the same, and what the engine does after loading was not "
            "observed: the bytes cannot prove where each element is"
        )
        return False
    return True


def _compare(placed: Placed, source: torch.Tensor, pool: ThreadPoolExecutor) -> _Compared:
    """Begin to compare every segment with the contiguous tensor that it is of, in pieces.

    A piece gives its digest, zero if it is not digested in this pass, or None if it differs.
    """

    def whole(segment: Segment) -> Digest | None:
        return Digest.ZERO if holds(segment, source) else None

    compared: _Compared = []
    for segment in placed.segments:
        runs = _runs(segment, source)
        if runs is None:
            compared.append((segment, [pool.submit(whole, segment)], False))
            continue
        live, expected = runs
        pieces = []
        for at in range(0, live.size, _PIECE):
            piece = live[at : at + _PIECE], expected[at : at + _PIECE], segment.source_offset + at
            pieces.append(pool.submit(digest_if_equal, placed.spec.name, *piece))
        compared.append((segment, pieces, True))
    return compared


def _runs(segment: Segment, source: torch.Tensor) -> tuple[Bits, Bits] | None:
    """Return a segment's elements, live and expected, if both are one run in host memory."""
    tensor = segment.live.tensor
    if segment.repack is not None or tensor.dtype != source.dtype or tensor.device.type != "cpu":
        return None
    live, expected = segment.live_view(), segment.source_view(source)
    if not (live.is_contiguous() and expected.is_contiguous()):
        return None
    return host_bits(bits_of(live.view(-1))), host_bits(bits_of(expected.view(-1)))


def _judge(placed: Placed, source: torch.Tensor, compared: _Compared, certified: Certified) -> None:
    if placed.status is not Status.UNJUDGED:  # the checkpoint has the name twice
        return
    digests: dict[SourceBox, Digest] = {}
    for segment, pieces, digested in compared:
        results = [piece.result() for piece in pieces]
        found = [one for one in results if one is not None]
        if len(found) < len(results):
            placed.refuse(
                f"the bytes in {segment.live.name} are not the checkpoint's: the engine moved or "
                "changed them after loading"
            )
            return
        if digested:
            digests[box_of(segment)] = Digest.total(found)
    if all(segment.live.tensor.dtype == source.dtype for segment in placed.segments):
        placed.status = Status.EXACT
        certified[placed.spec.name] = digests
    else:
        placed.status = Status.CAST


def _all_equal(source: torch.Tensor) -> bool:
    bits = bits_of(source.view(-1))
    return bits.numel() > 1 and bool((bits == bits[0]).all())


def holds(segment: Segment, source: torch.Tensor) -> bool:
    """Return whether the live box has exactly the bits of the contiguous checkpoint tensor's."""
    live = gather_live(segment)
    expected = segment.source_view(source).to(device=live.device, dtype=live.dtype)
    bits = torch_bits_dtype(live.dtype)
    return torch.equal(live.contiguous().view(bits), expected.contiguous().view(bits))
