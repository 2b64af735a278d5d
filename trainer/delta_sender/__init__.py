"""Send a trainer's weights to vLLM and SGLang engines: compare, encode what changed, post it.

    >>> import torch
    >>> from delta_sender import DeltaSender
    >>> weights = {"lm_head.weight": torch.zeros(16, 4, dtype=torch.bfloat16)}
    >>> with DeltaSender("http://engine:8000", base=weights.items()) as sender:
    ...     for step in range(3):
    ...         weights["lm_head.weight"][step] += 0.5  # your training step
    ...         report = sender.sync(weights.items())
    >>> report.version, f"{report.density:.1%} of the elements"
    (3, '6.2% of the elements')

`MultiSender` keeps several engines, of either kind, at one version; `ShardedSender` sends from
every rank of a trainer; `LogSender`, or `DeltaSender` with a log's url, publishes for engines that
follow a delta log. The command ``delta-send`` (``python -m delta_sender``) sends the difference
between two Hugging Face checkpoints.

The one rule: the snapshot is what the engine holds. It advances only once the engine has answered
that it committed, and by exactly the bytes sent. Whatever fails, the next sync sends all of it.

A sender opens a run, which owns its engines until it is closed. A full sync that nobody asked for
replaces only what the run has sent, or what a digest has shown to be the base.

The engine's plan is read before the first sync and before every full one. Tensors that the engine
ignores are left out of every sync. The digests that it keeps let engine and sender find out if
they do not hold the same bytes.

Rooms, in the order in which the data passes:

- `models`: read live models and checkpoints as (name, tensor).
- `diff`: compare the weights with the snapshot.
- `encode`: build parts of what has changed.
- `publish`: deliver them to engines and logs; the senders.
- `sharded`: send from all ranks of a trainer that holds shards.
- `integrations`: put it into trainers.
- `rollouts`: read which weights have computed each token of an engine's answers.
- `options`, `results`, `arguments`, `locations`, `run`: what the senders take, return and raise.
- `cli`, `send_command`: the command.

The package needs no engine. It can import `engine_ext.format`, `engine_ext.kernels`,
`engine_ext.log`, `engine_ext.errors`, `engine_ext.dtypes`, `engine_ext.files`,
`engine_ext.store_urls`, `engine_ext.resources`, `engine_ext.settings`, `engine_ext.answers`,
`engine_ext.commands`, `engine_ext.ranks` and `engine_ext.structs`. To import it takes a moment:
what needs torch is imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from delta_sender.options import SenderOptions
from delta_sender.results import (
    EngineBusy,
    EngineUnreachable,
    FleetOutcome,
    FullSyncRefused,
    GroupAborted,
    PartialSyncError,
    RankError,
    RunConflict,
    RunFenced,
    ShardedReport,
    SyncError,
    SyncReport,
)
from engine_ext.resources import RateLimit

if TYPE_CHECKING:
    from delta_sender.diff.quantize import Quantizer, quantize_weight
    from delta_sender.diff.snapshot import NamedTensors
    from delta_sender.models import ModelTensors, checkpoint_names, named_tensors
    from delta_sender.models.model_sync import sync_model
    from delta_sender.publish.log_sender import LogSender
    from delta_sender.publish.multi_sender import MultiSender
    from delta_sender.publish.sender import DeltaSender
    from delta_sender.sharded import Shard, ShardedSender, model_shards

# What imports torch, by module.
_LATER: Final = {
    "diff.quantize": ("Quantizer", "quantize_weight"),
    "diff.snapshot": ("NamedTensors",),
    "models": ("ModelTensors", "checkpoint_names", "named_tensors"),
    "models.model_sync": ("sync_model",),
    "publish.log_sender": ("LogSender",),
    "publish.multi_sender": ("MultiSender",),
    "publish.sender": ("DeltaSender",),
    "sharded": ("Shard", "ShardedSender", "model_shards"),
}

__all__ = [
    "DeltaSender",
    "EngineBusy",
    "EngineUnreachable",
    "FleetOutcome",
    "FullSyncRefused",
    "GroupAborted",
    "LogSender",
    "ModelTensors",
    "MultiSender",
    "NamedTensors",
    "PartialSyncError",
    "Quantizer",
    "RankError",
    "RateLimit",
    "RunConflict",
    "RunFenced",
    "SenderOptions",
    "Shard",
    "ShardedReport",
    "ShardedSender",
    "SyncError",
    "SyncReport",
    "checkpoint_names",
    "model_shards",
    "named_tensors",
    "quantize_weight",
    "sync_model",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
