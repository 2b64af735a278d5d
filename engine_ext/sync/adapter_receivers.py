"""The receivers of LoRA adapters' own tensors, next to the receiver of the model.

An engine makes other tensors of an adapter (merged layers, folded scaling, slices per rank) than
its folder has. So every rank keeps the folder's tensors of each adapter in a store. A sync writes
into the store, and before the ranks vote the engine makes its adapter from the store with its own
functions, again after an undo. Each adapter has a version, a digest and staged parts of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
import torch

from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.errors import Conflict, EngineUncertain, as_delta_error, from_wire
from engine_ext.format import tensor_digest
from engine_ext.kernels import bits_of, host_bits
from engine_ext.model import StorageIndex
from engine_ext.placement import Placed, Placement, Segment, Status, TensorSpec, make_plan
from engine_ext.ranks import RankGroup, cores_per_rank, run_on_all_or_none
from engine_ext.ranks import operations as ops
from engine_ext.settings import Settings
from engine_ext.startup import Recomputed
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.post_load import PostLoad
from engine_ext.sync.receiver import Receiver, keeps_part

logger = logging.getLogger(__name__)

# They lead to a write, or are one.
_WRITES = (ops.BeginPart, ops.PrepareSync, ops.HoldSync, ops.CommitSync, ops.RollBack)


@dataclass(eq=False)
class AdapterStore:
    """The tensors of one loaded adapter on one rank, as its folder has them.

    Attributes:
        tensors: contiguous and on the CPU; syncs write into them.
        install: makes the engine's own adapter of what `tensors` hold now.
        receiver: None until a request names the adapter, and after it was unloaded.
        synced: whether a request has named the adapter. From then on the engine must load it from
            the store, never from its folder.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    install: Callable[[], object]
    receiver: Receiver | None = None
    synced: bool = False


class AdapterStores(Protocol):
    """What an engine's adapter knows of the adapters on one rank."""

    def find(self, name: str) -> AdapterStore:
        """Return the store of an adapter; AdapterNotLoaded if there is none."""

    def loaded(self) -> Sequence[AdapterStore]:
        """Return the store of every adapter that is loaded."""

    def unload(self, name: str) -> None:
        """Find an adapter no more. Requests that are running might still need its store."""


class AdapterReceivers:
    """One rank's receivers: the model's, and one for each adapter.

    An operation that names no adapter is the model's. While the tensors of the model or of an
    adapter are uncertain, nothing else can be written: the full sync that heals them lets
    generation resume.
    """

    def __init__(
        self, model: Receiver, stores: AdapterStores, ranks: RankGroup, settings: Settings
    ) -> None:
        self._model, self._stores = model, stores
        self._ranks, self._settings = ranks, settings
        self._asleep = False

    # What the engine's adapter reports; see `Receiver` ----------------------------------------

    def weights_replaced(self, by: str) -> None:
        """Take only a full sync of the model from now on. Adapters are not changed by that."""
        self._model.weights_replaced(by)

    def weights_discarded(self, by: str) -> None:
        """See `Receiver.weights_discarded`; the engine loads all adapters again afterwards."""
        self._model.weights_discarded(by)

    def weights_returned(self) -> None:
        """See `Receiver.weights_returned`."""
        self._model.weights_returned()

    def weights_released(self) -> None:
        """Prepare for the engine to release the memory of weights and adapters."""
        self._asleep = True
        for receiver in self._all():
            receiver.weights_released()

    def set_asleep(self, asleep: bool, *, other: bool = False) -> None:
        """Record whether that memory is released, and `other` memory to generate with."""
        self._asleep = asleep
        for receiver in self._all():
            receiver.set_asleep(asleep, other=other)

    # Operations -------------------------------------------------------------------------------

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation; see `Receiver.handle`."""
        return ops.encode_answer(lambda: self.execute(ops.decode_request(operation, arguments)))

    def execute(self, request: ops.Operation[ops.ReplyT]) -> ops.ReplyT:
        """Carry out one operation; raises what its method raises.

        Raises:
            AdapterNotLoaded: some rank has not loaded the adapter. No rank has done anything.
            Conflict: the ranks have different tensors of the adapter.
            EngineUncertain: an earlier write, of something else, has failed half-way.
        """
        if isinstance(request, ops.AbortSync) and request.unloads:
            self._unload(request.adapter)
            return cast(ops.ReplyT, ops.Reply())
        receiver = self._model
        if request.adapter is not None:
            receiver = self._receiver(request.adapter)
        if isinstance(request, _WRITES) and not keeps_part(request):
            run_on_all_or_none(self._ranks, lambda: self._check_others(receiver))
        reply = receiver.execute(msgspec.structs.replace(request, adapter=None))
        return self._completed(request, reply)

    def _unload(self, adapter: str | None) -> None:
        """Take no more syncs for an adapter, unless one must heal it on some rank."""
        receivers = [s.receiver for s in self._stores.loaded() if s.name == adapter]
        uncertain = any(receiver and receiver.uncertain for receiver in receivers)
        if adapter is not None and not any(self._ranks.all_gather(uncertain)):
            self._stores.unload(adapter)

    def _all(self) -> list[Receiver]:
        stores = self._stores.loaded()
        return [self._model, *(s.receiver for s in stores if s.receiver is not None)]

    def _check_others(self, receiver: Receiver) -> None:
        if receiver is not self._model and self._model.uncertain:
            raise EngineUncertain(
                "an earlier write of the model's weights failed half-way; send a full sync of them"
            )
        for store in self._stores.loaded():
            if store.receiver not in (None, receiver) and store.receiver.uncertain:
                raise EngineUncertain(
                    f"an earlier write of adapter {store.name} failed half-way; send a full sync "
                    "of it first",
                    adapter=store.name,
                )

    def _completed(self, request: ops.Operation[ops.ReplyT], reply: ops.ReplyT) -> ops.ReplyT:
        """Add what one receiver does not know of the others."""
        if not isinstance(reply, ops.RankReport | ops.BoardLease):
            return reply
        facts: dict[str, Any] = {}
        if any(receiver.uncertain for receiver in self._all()):
            facts["engine_state"] = "uncertain"
        changed = {"state": msgspec.structs.replace(reply.state, **facts)}
        if isinstance(reply, ops.RankReport) and reply.status is not None:
            if request.adapter is None:
                facts["adapters"] = [_described(store) for store in self._stores.loaded()]
            changed["status"] = msgspec.structs.replace(reply.status, **facts)
        return msgspec.structs.replace(reply, **changed)

    def _receiver(self, name: str) -> Receiver:
        """Return the receiver of an adapter, which is made on all ranks at the first request."""
        store, vote = None, dict[str, Any]()
        try:
            store = self._stores.find(name)
            vote["begun"] = store.receiver is not None
        except Exception as error:
            vote["error"] = as_delta_error(error).to_wire()
        votes = self._ranks.all_gather(vote)
        errors = [vote["error"] for vote in votes if "error" in vote]
        if errors:
            raise from_wire(errors[0])
        assert store is not None
        begun = [vote["begun"] for vote in votes]
        if any(begun) and not all(begun):
            raise Conflict(
                f"adapter {name} was loaded again on some ranks only; load it again", adapter=name
            )
        if store.receiver is None:
            store.receiver = make_adapter_receiver(store, self._ranks, self._settings)
            store.synced = True
            store.receiver.set_asleep(self._asleep)
        return store.receiver


def make_adapter_receiver(store: AdapterStore, ranks: RankGroup, settings: Settings) -> Receiver:
    """Make the receiver of a store. All ranks must call it.

    Raises:
        Conflict: the stores of the ranks differ.
    """

    def prepare() -> tuple[torch.nn.Module, StorageIndex, Placement, dict[str, list[Any]]]:
        model = _module(store.tensors)
        index = StorageIndex(model)
        return model, index, _identity(store.tensors, index), _content(store.tensors)

    model, index, placement, content = run_on_all_or_none(ranks, prepare)
    contents = ranks.all_gather(content)
    if any(content != contents[0] for content in contents):
        raise Conflict(
            f"the ranks have read different tensors of adapter {store.name}; load it again",
            adapter=store.name,
        )
    plan = make_plan(placement, ranks)
    installed = Recomputed(store.install, (), {}, frozenset(store.tensors))
    applier = DeltaApplier(
        model,
        index,
        plan,
        undo_bytes=settings.undo_bytes,
        threads=cores_per_rank(ranks),
        post_load=PostLoad(model, index, placement, ranks, recomputed=[installed]),
        ranks=ranks,
    )
    logger.info("delta updates: adapter %s: %d tensors", store.name, len(store.tensors))
    own = msgspec.structs.replace(settings, base_version=0, scrub_interval=None)
    return Receiver(applier, ranks, own)


def _content(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return dtype, shape and digest of every tensor, as JSON."""
    return {
        name: [
            NAME_OF_TORCH[tensor.dtype],
            list(tensor.shape),
            tensor_digest(name, host_bits(bits_of(tensor.view(-1)))).hex(),
        ]
        for name, tensor in tensors.items()
    }


def _module(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module whose parameters are some tensors, under their names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, attribute = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, torch.nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(attribute, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def _identity(tensors: Mapping[str, torch.Tensor], index: StorageIndex) -> Placement:
    """Return the placement of tensors in themselves."""
    placement: Placement = {}
    for name, tensor in tensors.items():
        placed = Placed(TensorSpec(name, tuple(tensor.shape), tensor.dtype))
        live, strides = index.by_name.get(name), tensor.stride()
        if live is None:  # it has no elements
            placed.status = Status.NOT_ON_RANK
        else:
            whole = Segment(live, 0, strides, tuple(tensor.shape), 0, strides, python_copy=False)
            placed.segments, placed.status = [whole], Status.EXACT
        placement[name] = placed
    return placement


def _described(store: AdapterStore) -> ops.LoadedAdapter:
    if store.receiver is None:
        return ops.LoadedAdapter(name=store.name, version=0, digest=None)
    status = store.receiver.status(ops.GetStatus()).status
    assert status is not None
    return ops.LoadedAdapter(name=store.name, version=status.version, digest=status.digest)
