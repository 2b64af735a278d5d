"""Read the tensors of a plan: the class `ModelTensors`."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from delta_sender.diff.refills import Stable
from delta_sender.models.model_state import (
    VALUE_HEAD,
    live_buffers,
    plain_name,
    refuse_offloaded,
)
from delta_sender.models.plan import Batch, Plan, batches_of
from delta_sender.models.ranks import Agreement, gather, plain


class ModelTensors(Stable):
    """The tensors of a model under the names of its checkpoint, one after the other.

    If parameters are sharded, every rank must read all, since each is gathered by all ranks; a rank
    that does not want them calls `take_part`. When reading ends early on one rank, by an error here
    or by `close`, that rank still takes part in gathering the rest, and then all ranks raise: no
    rank waits for ever, and no sender takes tensors for complete that are not.

    The last tensor is yielded before the ranks have agreed, and the iterator ends, or raises,
    after: whoever acts on the tensors before the iterator has ended acts on unconfirmed ones.

    Attributes:
        is_broken: Whether a collective failed on this rank, so that it takes part in no more.
    """

    def __init__(self, plan: Plan) -> None:
        refuse_offloaded(plan.state.model, plan.state.live)
        self._plan = plan
        self._batches = batches_of(plan.groups, plan.state.modules)
        self._agreement = Agreement(plan.state.live.values())
        self._to_gather = deque(n for batch in self._batches for n in self._reads(batch))
        self._waiting = deque(self._batches)
        self._ready = deque(plan.unchanged.items())
        self._ended = False
        self.is_broken = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        while not self._ready:
            if self._ended:
                raise StopIteration
            if not self._waiting:
                self._end(failed=False)
                raise StopIteration
            self._read(self._waiting.popleft())
        return self._ready.popleft()

    def close(self) -> None:
        """End reading. If tensors are left, gather them with the other ranks; they will raise."""
        if self._ended:
            return
        complete = not self._ready and not self._waiting
        self._drain()
        self._end(failed=not complete, raises=False)

    def take_part(self) -> None:
        """Gather every tensor with the other ranks and drop it.

        Raises:
            RuntimeError: Reading failed on another rank.
        """
        self._drain()
        self._end(failed=False)

    def _reads(self, batch: Batch) -> list[str]:
        merged = {key for module in batch.modules for key in module.outputs}
        keys = [key for group in batch.groups for key in group.keys if key not in merged]
        plain = [self._plan.state.reads[key] for key in keys]
        return [*plain, *(name for module in batch.modules for name in module.reads)]

    def _gather(self) -> tuple[str, torch.Tensor]:
        name = self._to_gather[0]
        try:
            whole = gather(self._plan.state.live[name])
        except BaseException:
            # It is not known which collective the other ranks wait in: take part in no more.
            self._ended = self.is_broken = True
            raise
        self._to_gather.popleft()
        return name, whole

    def _read(self, batch: Batch) -> None:
        whole = dict(self._gather() for _ in self._reads(batch))
        try:
            whole = {name: plain(name, tensor) for name, tensor in whole.items()}
            tensors = {key: whole[n] for key, n in self._plan.state.reads.items() if n in whole}
            for module in batch.modules:
                tensors |= module.merge(whole)
            del whole
            for group in batch.groups:
                self._ready.extend(self._plan.build(group, tensors).items())
        except BaseException:
            self._ready.clear()
            self._drain()
            self._end(failed=True, raises=False)
            raise

    def _drain(self) -> None:
        self._ready.clear()
        self._waiting.clear()
        while self._to_gather:
            self._gather()

    def _end(self, *, failed: bool, raises: bool = True) -> None:
        if self._ended:
            return
        self._ended = True
        rank = self._agreement.failed_rank(failed=failed)
        if rank is not None and raises:
            raise RuntimeError(f"rank {rank} stopped reading the model; see the error there")


def from_stream(
    plan: Plan,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    frozen: bool | Iterable[str] = False,
    live: nn.Module | None = None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the checkpoint's tensors, given the model's as a framework gathers them.

    Each tensor is copied before the next is taken. However this ends, `tensors` is read to its end,
    because other ranks take part in gathering them.

    Args:
        tensors: All tensors under their names in the model, adapters merged, in any order. Any name
            of tied ones will do; those that are given under several must be equal. A value head is
            dropped.
        frozen: Which tensors can be left out, because they are not trained; they are then the
            base's. True: all parameters. Otherwise patterns of names, as of `fnmatch`.
        live: The model that is trained. Persistent buffers that `tensors` leaves out are read from
            it; a buffer has no gradient, but it can be trained all the same.

    Raises:
        ValueError: A tensor is missing, is not known, or has another shape, or tied ones differ.
    """
    state, source = plan.state, iter(tensors)
    group_of = {key: group for group in plan.groups for key in group.keys}
    missing = {id(group): set(group.keys) for group in plan.groups}
    pending: dict[str, torch.Tensor] = {}
    tied = set(state.aliases.values())
    given_first: dict[str, tuple[str, torch.Tensor]] = {}  # of tied ones: a name, and a copy

    def take(given: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        key = state.aliases.get(plain_name(given), plain_name(given))
        if key not in group_of:
            if key.startswith(VALUE_HEAD):
                return
            raise ValueError(f"{given}: not a tensor of the model{_class_of(state.model)}")
        group = group_of[key]
        if key not in missing[id(group)]:
            if key in given_first:
                _refuse_untied(given_first[key], (given, plain(given, tensor)))
            return
        if tensor.shape != state.tensors[key].shape:
            wanted = list(state.tensors[key].shape)
            raise ValueError(f"{given}: {list(tensor.shape)}, but {wanted} in the model")
        copied = plain(given, tensor)
        pending[key] = tensor.detach().clone() if copied is tensor else copied
        missing[id(group)].remove(key)
        if key in tied:
            given_first[key] = given, pending[key]
        if not missing[id(group)]:
            yield from plan.build(group, {key: pending.pop(key) for key in group.keys}).items()

    try:
        yield from plan.unchanged.items()
        for given, tensor in source:
            yield from take(given, tensor)
        buffers = {plain_name(name) for name, _ in state.model.named_buffers()}
        absent = sorted(key for keys in missing.values() for key in keys)
        if live is not None and not buffers.isdisjoint(absent):
            held = live_buffers(live)
            for key in [key for key in absent if key in buffers and key in held]:
                yield from take(key, held[key])
                absent.remove(key)
        refuse_left_out(absent, buffers, frozen)
        for group in {id(group_of[key]): group_of[key] for key in absent}.values():
            if len(missing[id(group)]) < len(group.keys):
                raise ValueError(f"{group.keys[0]}: given in part")
            yield from plan.untrained(group)
    finally:
        for _ in source:
            pass


def _refuse_untied(first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]) -> None:
    """Refuse a tensor that differs from one which the model ties to it.

    Raises:
        ValueError: Its bits are others.
    """
    (name, held), (other, tensor) = first, second
    kinds = [(one.shape, one.dtype) for one in (held, tensor)]
    if kinds[0] == kinds[1] and torch.equal(_bytes(held), _bytes(tensor)):
        return
    raise ValueError(
        f"{other}: tied to {name} in the model, but given with other values; set "
        "tie_word_embeddings=False in the base that engines are started with, or train the two "
        "as one"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name fits one of some patterns, as of `fnmatch`, or the only one."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_left_out(
    absent: Iterable[str],
    buffers: Container[str],
    frozen: bool | Iterable[str],
    *,
    live: str = "the live model, which it is then read from (model=)",
) -> None:
    """Refuse tensors that were left out and are not marked as untrained.

    Args:
        live: Name of the argument from which buffers are read.

    Raises:
        ValueError: There are some.
    """
    patterns: Iterable[str] = [] if isinstance(frozen, bool) else frozen
    left = [key for key in absent if not is_named(key, patterns)]
    if parameters := [key for key in left if key not in buffers and frozen is not True]:
        raise ValueError(f"missing, but in the model: {', '.join(parameters[:5])}")
    if trained := [key for key in left if key in buffers]:
        raise ValueError(
            f"{', '.join(trained[:5])}: a buffer that the given tensors leave out, and that can be "
            f"trained without a gradient. Give {live}, yield it with the other tensors, or name it "
            "in frozen=[...] if it is not trained"
        )


def _class_of(model: nn.Module) -> str:
    if not hasattr(model, "save_pretrained"):
        return ""
    name = type(model).__name__
    return f", a {name}; the trainer must load the checkpoint as transformers.{name}"
