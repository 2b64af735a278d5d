"""The trainer's half of vLLM's weight-transfer backend `delta_updates`.

Importing this registers it: `WeightTransferTrainerFactory.trainer_init` then takes a
`DeltaTrainerInitInfo`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from delta_sender.diff.refills import StableGenerator
from delta_sender.integrations.transfer_destination import Channel, TransferDestination
from delta_sender.models import checkpoint_names
from delta_sender.models.model_sync import on_all_ranks
from delta_sender.publish.multi_sender import MultiSender
from delta_sender.results import SyncReport, raising_as_one

BACKEND = "delta_updates"


@dataclass
class DeltaTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What `trainer_init` takes; rank 0 compares and sends.

    Attributes:
        base: Folder of the checkpoint that the engine was started with.
        url: The engine's root; None: the ``base_url`` of the client. Its ``/delta_status`` is read.
        model: The model of the source, or one like it on the meta device, if its names are not the
            checkpoint's or the source leaves out persistent buffers, as `ModuleSource` does: they
            are read from the model. See `delta_sender.checkpoint_names`.
        frozen: Which tensors the source leaves out because they are not trained; they are then the
            base's. See `checkpoint_names`; needs `model`.
        channel: How parts travel; inline if None.
        options: Keyword arguments of `DeltaSender`.
    """

    backend: ClassVar[str] = BACKEND

    base: str | os.PathLike[str]
    url: str | None = None
    model: nn.Module | None = None
    frozen: bool | Sequence[str] = False
    channel: Channel | None = None
    options: dict[str, Any] = field(default_factory=dict)


class DeltaTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends what changed in a `WeightSource`, by any client of vLLM's weight-transfer API.

    Attributes:
        report: What the last `send_weights` sent, on the sender's rank.
    """

    init_info_cls = DeltaTrainerInitInfo

    def __init__(self, init_info: DeltaTrainerInitInfo, *, client: Any, source: Any) -> None:
        # From vLLM 0.33 on the base class has the rank.
        known = inspect.signature(super().__init__).parameters
        rank = {"rank": init_info.rank} if "rank" in known else {}
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, **rank)
        self._info = init_info
        self._sender: MultiSender | None = None
        self.report: SyncReport | None = None

    @classmethod
    def trainer_init(
        cls, init_info: DeltaTrainerInitInfo, *, client: Any, source: Any = None
    ) -> DeltaTrainerEngine:
        """Read the base, and open the engine's half; on every rank of the trainer.

        Raises:
            ValueError: There is no source, no url, or an option has an unknown value.
            SyncError: The engine refused.
        """
        if source is None:
            raise ValueError("delta_updates needs a WeightSource: it compares whole tensors")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._open()
        return engine

    def send_weights(self) -> None:
        """Send what changed since the last call; on every rank of the trainer.

        All of the source is read on every rank, however this ends, and if one rank fails, all
        raise, as long as there is a default process group of torch.distributed.

        Raises:
            SyncError: See `DeltaSender.sync`.
            ValueError: The tensors are not the base's.
            RuntimeError: Another rank has failed.
        """
        on_all_ranks(self._send)

    def shutdown(self) -> None:
        """Close the sender."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _open(self) -> None:
        info, client = self._info, self.client
        url = info.url or getattr(client, "base_url", None)
        if url is None:
            raise ValueError("the client has no base_url: give url")

        def connect(url: str, options: Any) -> TransferDestination:
            return TransferDestination(url, options, client, info.channel or Channel())

        self._sender = MultiSender([url], info.base, connect=connect, **info.options)

    def _send(self) -> None:
        source = whole_tensors(self.source)
        try:
            if self.is_sender:
                self.report = self._sync(source)
        finally:
            for _ in source:  # other ranks might be gathering it
                pass

    def _sync(self, source: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        if self._sender is None:
            raise RuntimeError("the engine was shut down")
        info = self._info
        tensors: Generator[tuple[str, torch.Tensor], None, None] | StableGenerator
        if info.model is None:
            tensors = StableGenerator((name, t.detach().clone()) for name, t in source)
        else:
            form = info.options.get("quantize")
            tensors = checkpoint_names(
                source, info.model, info.base, frozen=info.frozen, quantize=form
            )
        with raising_as_one(1), closing(tensors):
            [report] = self._sender.sync(tensors).values()
        return report


def whole_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a fresh pass over a `WeightSource` that yields whole tensors.

    vLLM 0.33 replaced iteration by ``iter_full``, in which a rank yields what it owns.

    Raises:
        ValueError: The source yields this rank's pieces only. Nothing was sent.
    """
    if not hasattr(source, "iter_full"):
        return iter(source)
    if not source.implements_iter_full():
        raise ValueError(
            f"{type(source).__name__} implements iter_local only; delta_updates compares whole "
            "tensors: implement iter_full, or send the pieces with ShardedSender"
        )
    tensors: Iterator[tuple[str, torch.Tensor]] = source.iter_full()
    return tensors


WeightTransferTrainerFactory.register_engine(BACKEND, DeltaTrainerEngine)
