"""Keep the weights that engines hold, and find how new ones differ.

`compare` finds the differences of tensors in host memory, `device_batch` those of tensors on an
accelerator.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np
import torch
from msgspec.structs import replace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from delta_sender.diff.change import Bits, Change, Elements, EncodedElements, add, decoded
from delta_sender.diff.compare import Comparisons, Difference, compare
from delta_sender.diff.device import DeviceSide, is_on_device
from delta_sender.diff.device_batch import DeviceComparisons
from delta_sender.diff.refills import Stable, Unchanged, Yielded
from delta_sender.diff.spill import Keep, Spill
from engine_ext.answers import prefix_hint, some_of
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype, torch_bits_dtype
from engine_ext.format import PACKED_ENCODINGS, Digest, ParamDelta, change_digest, tensor_digest
from engine_ext.kernels import gather_scatter, same_device
from engine_ext.kernels.triton import runs_change_kernels
from engine_ext.resources import usable_cores

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Changes = dict[str, Change]  # by name in the snapshot
_Given: TypeAlias = tuple[str, torch.Tensor, str]  # name, tensor, key

# Collections that keep their tensors.
_HOLDING: Final[tuple[type, ...]] = (list, tuple, type({}.items()))
# Types whose tensors have memory of their own.
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
# Most bytes of tensors that are being compared while an earlier one is waited for.
_AHEAD: Final = 128 << 20
# So many times as many bytes, if they are on a device and in no memory that we take.
_FASTER: Final = 8
# Elements that a thread writes at a time, at least.
_WRITTEN: Final = 1 << 16


class Snapshot:
    """A model, kept as bit patterns in host memory, and for CUDA tensors maybe on their device.

    Args:
        base: Tensors in checkpoint coordinates; copied. Tied ones (one storage, several names) are
            kept once, under the first name, their key.
        encoding: One of `engine_ext.format.positions.ENCODINGS`; a change that would take more
            bytes with its indices, before compression, than the whole tensor is kept dense.
        snapshot_on: One of `delta_sender.diff.device.SNAPSHOT_ON`.

    Raises:
        ValueError: Deltas do not carry a dtype, or a tensor wraps others.
    """

    def __init__(self, base: NamedTensors, encoding: str, snapshot_on: str = "auto") -> None:
        finish_device_work()
        self._encoding, self._streams = encoding, encoding in PACKED_ENCODINGS
        self._devices = DeviceSide(snapshot_on)
        self._dense: dict[str, ParamDelta] = {}
        self._memory: dict[str, torch.Tensor] = {}  # of their values
        self._threads = usable_cores()
        self._in_memory = 0  # most bytes of changes
        self._without_old: tuple[Changes, Changes] | None = None  # and of what changes
        self.tied: dict[str, str] = {}  # keys by the further names of tied tensors
        refilled: set[str] = set()  # names under which a buffer's memory first came
        devices: dict[str, torch.device] = {}
        for name, tensor, first in _with_ties(base):
            if is_on_device(tensor):
                runs_change_kernels(tensor.device)  # compiles them now, not in the first sync
                devices[name] = tensor.device
            if first is None:
                self._set(name, self._copy(name, tensor))
            elif isinstance(base, _HOLDING):
                self.tied[name] = first
            else:
                self._add_tied(name, tensor, first, refilled)
        for name, device in devices.items():
            if name in self._dense:
                self._prepare_on_device(name, device)

    def _add_tied(self, name: str, tensor: torch.Tensor, first: str, refilled: set[str]) -> None:
        """Take in a tensor that is in the memory of an earlier one, unless that was refilled."""
        if first not in refilled:
            if np.array_equal(_to_bits(name, tensor).values, self._dense[first].values):
                self.tied[name] = first
                return
            refilled.add(first)
            for other in [other for other, key in self.tied.items() if key == first]:
                del self.tied[other]
                self._set(other, self._keep(replace(self._dense[first], name=other)))
        self._set(name, self._copy(name, tensor))

    def _copy(self, name: str, tensor: torch.Tensor) -> ParamDelta:
        """Return a tensor of the base as the snapshot keeps it, dense."""
        if not is_on_device(tensor):
            return self._keep(_to_bits(name, tensor))
        dtype = _dtype_name(name, tensor)
        values = self._devices.copied(name, _flat_bits(tensor))
        return ParamDelta(name, dtype, tuple(tensor.shape), None, values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dense)

    def __contains__(self, name: object) -> bool:
        return name in self._dense

    @property
    def dtypes(self) -> dict[str, str]:
        """The manifest dtype of every tensor, by each of its names."""
        return {name: self._dense[self.key(name)].dtype for name in (*self._dense, *self.tied)}

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once; it stays."""
        return sum(dense.values.nbytes for dense in self._dense.values())

    def key(self, name: str) -> str:
        """Return the key of the tensor that is sent under `name`."""
        return self.tied.get(name, name)

    def read(
        self,
        tensors: NamedTensors,
        *,
        digests: bool = True,
        changes_in_memory: int | None = None,
    ) -> Iterator[tuple[str, Change | None]]:
        """Compare tensors with the snapshot, in threads, some tensors ahead.

        Args:
            tensors: Iterated in the caller's thread. Those of a collection and of a `Stable`
                iterator must not change until the end; what comes from any other can be refilled
                when the next is taken, see `refills`.
            digests: Whether changes found on the host are digested; those of a device are.
            changes_in_memory: Most bytes of changes that stay in memory, see `Spill`; None: a
                quarter of the snapshot.

        Yields:
            For every tensor of the snapshot its key, and its change, if any.

        Raises:
            ValueError: Names, shapes or dtypes are not the base's, which is checked first if
                `tensors` is a collection; tied tensors differ; one wraps others, as a sharded
                tensor does; or one has changed while it was compared.
        """
        finish_device_work()
        self.let_go()
        self._in_memory = self.nbytes // 4 if changes_in_memory is None else changes_in_memory
        keep = Spill(self._in_memory).keep
        yielded = None if isinstance(tensors, (*_HOLDING, Stable)) else Yielded()
        given: Iterable[_Given] = self._given(tensors)
        if isinstance(tensors, Collection):
            # A collection that makes its tensors has only one alive at a time.
            known = [*given] if isinstance(tensors, _HOLDING) else None
            self._refuse_missing({key for _, _, key in known or given})
            given = known or self._given(tensors)
        pool = ThreadPoolExecutor(
            self._threads, thread_name_prefix="delta-compare", initializer=same_device()
        )
        try:
            yield from self._read(
                given, pool, digests, keep, yielded, held=isinstance(tensors, _HOLDING)
            )
        finally:
            pool.shutdown(cancel_futures=True)

    def _given(self, tensors: NamedTensors) -> Iterator[_Given]:
        named: Iterable[tuple[str, torch.Tensor, str | None]]
        if isinstance(tensors, _HOLDING) and all(self._is_known(name) for name, _ in tensors):
            named = ((name, tensor, None) for name, tensor in tensors)  # their ties do not matter
        else:
            named = _with_ties(tensors)
        for name, tensor, first in named:
            yield name, tensor, self._key_of(name, tensor, first)

    def _read(
        self,
        tensors: Iterable[_Given],
        pool: Executor,
        digests: bool,
        keep: Keep,
        yielded: Yielded | None,
        *,
        held: bool,
    ) -> Iterator[tuple[str, Change | None]]:
        comparisons = Comparisons(pool, streams=self._streams)
        on_devices = DeviceComparisons(self._devices, pool, copied=not held)
        changes: dict[str, Change | None] = {}
        begun: deque[tuple[str, int, Callable[[], Difference | Change], Unchanged | None]] = deque()
        wait: Callable[[], Difference | Change]
        seen: set[str] = set()
        ahead = 0  # bytes of what is begun

        def finish() -> tuple[str, Change | None]:
            nonlocal ahead
            key, nbytes, wait, is_unchanged = begun.popleft()
            ahead -= nbytes
            change = self._change(key, wait())
            if is_unchanged is not None and not is_unchanged():
                raise ValueError(
                    f"{key}: has changed since it was yielded. It must keep its values until the "
                    "sync ends: yield copies of a buffer that is refilled or freed"
                )
            changes[key] = None if change is None else keep(change)
            return key, changes[key]

        for name, tensor, key in tensors:
            if key in seen:
                while key not in changes:
                    yield finish()
                new = _to_bits(name, tensor)
                if not np.array_equal(new.values, self.image(key, changes[key]).values):
                    raise ValueError(f"{name}: differs from {key}, which it is tied to or repeats")
                continue
            seen.add(key)
            nbytes = tensor.nbytes
            if is_on_device(tensor):
                # A larger one is compared before the next is taken. Copying is cheap on a device.
                is_copied = yielded is not None and tensor.nbytes <= _AHEAD
                kept = tensor.clone() if is_copied else tensor
                unchanged, at_once = None, False
                self._prepare_on_device(key, tensor.device)
                flat = _flat_bits(kept)
                wait = on_devices.begin(key, self._dense[key], flat)
                if held and flat.data_ptr() == tensor.data_ptr():
                    nbytes //= _FASTER
            else:
                bits, unchanged, at_once = _in_host_memory(name, tensor), None, False
                if yielded is not None:
                    bits, unchanged, at_once = yielded.take(bits)
                wait = comparisons.begin(self._memory[key], bits, key if digests else None)
            begun.append((key, nbytes, wait, unchanged))
            ahead += nbytes
            while ahead > _AHEAD or (at_once and begun):
                yield finish()
        while begun:
            yield finish()
        self._refuse_missing(seen)

    def _prepare_on_device(self, key: str, device: torch.device) -> None:
        """Make a tensor ready to be compared on a device."""
        old = self._dense[key]
        bits = self._devices.prepare(key, old.values, device, self.nbytes)
        if bits is not old.values:
            self._set(key, replace(old, values=bits))

    def _is_known(self, name: str) -> bool:
        return name in self._dense or name in self.tied

    def _key_of(self, name: str, tensor: torch.Tensor, first: str | None) -> str:
        """Return the key of a tensor, which must have the dtype and shape of the base's.

        Args:
            first: An earlier name of the same tensor, if any, in case that this one is new.
        """
        _refuse_valueless(name, tensor)
        key = self.key(name if first is None or self._is_known(name) else first)
        old = self._dense.get(key)
        if old is None:
            raise ValueError(f"{name}: not in the base{prefix_hint(name, self._dense)}")
        dtype, shape = _dtype_name(name, tensor), tensor.shape
        if dtype != old.dtype or shape != old.shape:
            given = f"{dtype} {tuple(shape)}"
            cure = (
                ""
                if shape != old.shape
                else ("; give it in that dtype, as named_tensors(model, base) does")
            )
            raise ValueError(f"{name}: {given}, but {old.dtype} {old.shape} in the base{cure}")
        return key

    def _refuse_missing(self, seen: set[str]) -> None:
        if missing := self._dense.keys() - seen:
            raise ValueError(f"missing, but in the base: {some_of(missing)}")

    def image(self, key: str, change: Change | None = None) -> ParamDelta:
        """Return a tensor of the snapshot with a change made, dense; read-only, maybe no copy."""
        old = self._dense[key]
        if change is None:
            return old
        if (elements := change.decoded()).indices is None:
            return replace(old, values=elements.new)
        self.check_decoded(key, change, elements)
        values = old.values.copy()
        gather_scatter.write(values, elements.indices, elements.new)
        return replace(old, values=values)

    def check_decoded(self, key: str, change: Change, elements: Elements) -> None:
        """Check that a device has compared with the snapshot's bits: by the digest that it made.

        Raises:
            RuntimeError: Its copy of the snapshot had others. The copies are dropped.
        """
        if not isinstance(change.elements, EncodedElements) or change.digest is None:
            return
        if change_digest(key, elements.indices, elements.old, elements.new) != change.digest:
            self._devices.drop_copies()
            raise RuntimeError(
                f"{key}: the copy of the snapshot on its device had other bits than the snapshot, "
                "so the change is not known; the next sync uploads the snapshot again"
            )

    def change_between(
        self, key: str, before: Change | None, after: Change | None
    ) -> Change | None:
        """Return the change from a tensor with `before` made to that tensor with `after` made."""
        if before is None:
            return after
        old, new = self.image(key, before).values, self.image(key, after).values
        found = self._found(key, compare(old, new, key, streams=self._streams))
        if found is None or self._is_smaller(found):
            return found
        # Neither the snapshot's memory, which advances, nor that of the change.
        own = new.copy() if after is None or after.is_dense else new
        return replace(found, elements=Elements(None, old, own))

    def sparse(self, change: Change) -> Change:
        """Return the change with indices, even if it is kept dense."""
        if not change.is_dense:
            return change
        whole = change.decoded()
        found = compare(whole.old, whole.new, threads=self._threads, streams=self._streams)
        return replace(change, elements=found.elements)

    def digest(self) -> Digest:
        """Return the digest of every tensor, under its key."""
        threads, dense = self._threads, self._dense.items()
        digests = (tensor_digest(name, one.values, threads=threads) for name, one in dense)
        return Digest.total(digests)

    def advance(self, changes: Changes) -> None:
        """Apply the committed `changes`."""
        self._without_old = None
        following = self._devices.following(changes, lambda key: self._dense[key].values)
        with following, ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(self._apply, _batches(changes)):
                pass

    def without_old(self, changes: Changes) -> Changes:
        """Return changes without what is not needed once they were sent.

        Those are old bits, gap streams, and elements that devices keep. All who ask get the same
        arrays, until `let_go` or `advance`; decoded ones are limited in memory like the changes.
        """
        if self._without_old is None or self._without_old[0] is not changes:
            keep = Spill(self._in_memory).keep
            made: Changes = {}
            each = decoded((one.elements for one in changes.values()), with_old=False)
            for (key, was), one in zip(changes.items(), each, strict=True):
                bare = replace(was, elements=one).without_old()
                made[key] = bare if one is was.elements else keep(bare)
            self._without_old = changes, made
        return self._without_old[1]

    def let_go(self) -> None:
        """Free what is kept of the changes that were read last: none of them will be applied.

        The next `read` does so, too.
        """
        self._without_old = None
        self._devices.let_go()

    def close(self) -> None:
        """Free the memory of devices."""
        self._without_old = None
        self._devices.drop_copies()

    def _apply(self, changes: Sequence[tuple[str, Change]]) -> None:
        """Apply one dense change, or several sparse ones of one element size."""
        encoded, rest = list[EncodedElements](), list[tuple[str, Elements]]()
        for key, change in changes:
            if isinstance(change.elements, Elements):
                rest.append((key, change.elements))
            else:
                encoded.append(replace(change.elements, held=self._dense[key].values))
        add(encoded)
        if not rest:
            return
        (key, first), *more = rest
        if first.indices is None:
            assert not more
            self._dense[key].values[:] = first.new
        elif not more:
            gather_scatter.write(self._dense[key].values, first.indices, first.new)
        else:
            gather_scatter.write_many(
                [self._memory[key] for key, _ in rest],
                [one.indices for _, one in rest if one.indices is not None],
                [one.new for _, one in rest],
            )

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        return replace(dense, values=dense.values.copy())

    def _set(self, key: str, dense: ParamDelta) -> None:
        self._dense[key], self._memory[key] = dense, gather_scatter.signed(dense.values)

    def _found(self, key: str, found: Difference | Change) -> Change | None:
        """Return a difference as a change; None if nothing differs."""
        if isinstance(found, Difference):
            old, counted = self._dense[key], (found.indices.size, found.change)
            found = Change(old.dtype, old.shape, found.elements, *counted)
        return found if found.nnz else None

    def _is_smaller(self, change: Change) -> bool:
        """Return whether a sparse change takes fewer bytes than the whole tensor."""
        nbytes = change.elements.position_bytes(self._encoding) + change.nnz * change.width
        return nbytes < math.prod(change.shape) * change.width

    def _change(self, key: str, difference: Difference | Change) -> Change | None:
        """Return a difference from the snapshot as a change, dense if it is large."""
        found = self._found(key, difference)
        if found is None or self._is_smaller(found):
            return found
        old, elements = self._dense[key], found.elements
        new = old.values.copy()
        if isinstance(elements, EncodedElements):
            self.check_decoded(key, found, found.decoded())
            add([replace(elements, held=new)])
        elif elements.indices is not None:
            gather_scatter.write(new, elements.indices, elements.new)
        return replace(found, elements=Elements(None, old.values, new))


class MappedSnapshot(Snapshot):
    """A snapshot of mapped files for one sync: it is neither copied nor advanced."""

    def advance(self, changes: Changes) -> None:
        pass

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        return dense


def _batches(changes: Changes) -> Iterator[list[tuple[str, Change]]]:
    """Yield what `Snapshot._apply` takes, so much that a thread works for longer than it is woken.

    A change that is large enough is alone in its batch.
    """
    batches: dict[int, list[tuple[str, Change]]] = {}
    elements = dict.fromkeys((1, 2, 4, 8), 0)
    for item in changes.items():
        change = item[1]
        size, width = change.nnz, change.width
        if change.is_dense or size >= _WRITTEN:
            yield [item]
            continue
        batches.setdefault(width, []).append(item)
        elements[width] += size
        if elements[width] >= _WRITTEN:
            yield batches.pop(width)
            elements[width] = 0
    yield from batches.values()


def _with_ties(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yield (name, tensor, earlier name of the same storage and view, if any).

    A weak reference keeps a freed storage's identity, not its memory, from being reused.

    Raises:
        ValueError: A tensor wraps others.
    """
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors:
        _refuse_valueless(name, tensor)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        view = (tensor.storage_offset(), tensor.dtype, *tensor.shape, *tensor.stride())
        first = names.setdefault((storage, *view), name)
        yield name, tensor, first if first != name and tensor.numel() else None


def _refuse_valueless(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` for a tensor without memory of its own, whose address might be 0."""
    if tensor.is_meta:
        raise ValueError(f"{name}: on the meta device, so it has no values")
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if not is_wrapper and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError(f"{name}: the tensor's memory has been freed")
    if is_wrapper:
        raise ValueError(
            f"{name}: a {type(tensor).__name__}, which holds its values in other tensors; give "
            "named_tensors(model, base), which has whole ones"
        )


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    dtype = NAME_OF_TORCH.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name}: deltas do not carry {tensor.dtype}")
    return dtype


def _to_bits(name: str, tensor: torch.Tensor) -> ParamDelta:
    """Return the tensor as a dense param: unsigned ints of its dtype's width, [numel], row-major.

    A contiguous CPU tensor is not copied.
    """
    return ParamDelta(
        name, _dtype_name(name, tensor), tuple(tensor.shape), None, host_bits(name, tensor)
    )


def host_bits(name: str, tensor: torch.Tensor) -> Bits:
    """Return a tensor's bits in host memory, [numel], row-major; maybe no copy.

    Raises:
        ValueError: Deltas do not carry its dtype.
    """
    dtype = _dtype_name(name, tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    finish_copy(tensor)
    bits: Bits = _flat_bits(tensor).numpy().view(bits_dtype(dtype))
    return bits


def _in_host_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its bits, contiguous in host memory; maybe no copy.

    It has memory of its own, which a tensor of a subclass might lack, and keeps it even if other
    memory is put into `tensor`. A tensor with the negative bit has other bits than its memory.
    """
    if type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        finish_copy(tensor)
        return tensor.data  # `detach` would give up the interpreter lock
    return gather_scatter.signed(host_bits(name, tensor))


def finish_device_work() -> None:
    """Wait for all streams of the current CUDA device: any can still write the tensors."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def finish_copy(tensor: torch.Tensor) -> None:
    """Wait for a copy to pinned memory that the caller has begun on the current stream."""
    if torch.cuda.is_initialized() and tensor.is_pinned():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def _flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as integers of its width, [numel], row-major; maybe no copy."""
    return tensor.detach().contiguous().view(-1).view(torch_bits_dtype(tensor.dtype))
