"""The worker half of vLLM's weight-transfer backend `delta_updates`.

Parts are staged and committed from the front end (`transfer_frontend`), in the transaction of
posted ones. The workers' own methods of the API would bypass it, so they refuse. One of the workers
takes part in a collective if the trainer sends over one.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from engine_ext.adapters.vllm.transfer_group import TransferGroup


class DeltaTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The engine object that vLLM makes in every worker, with vLLM's constructor arguments.

    Every method of the API raises RuntimeError, with the weights unchanged: the API of an engine
    without its HTTP server has nothing that pauses, publishes versions and resets caches.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        is_first = (parallel.data_parallel_index, parallel.rank) == (0, 0)
        self.group = TransferGroup(device, receives=is_first)

    def init_transfer_engine(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse; see the class."""
        raise RuntimeError(
            "the weight-transfer backend delta_updates works through vLLM's HTTP server, started "
            "with --enable-delta-updates; the weights are unchanged"
        )

    start_weight_update = update_weights = init_transfer_engine
    receive_weights = finish_weight_update = init_transfer_engine

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        self.group.close()
