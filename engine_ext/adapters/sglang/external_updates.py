"""Weight changes outside of delta sync: SGLang's own updates, and releasing the weights' memory.

After one of these the base of a delta is unknown, and a failed one might have written some of the
weights. SGLang can serve what it has then, but only a full sync is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from engine_ext.adapters.sglang.names import LOAD_FORMAT
from engine_ext.sync import Receiver

_WEIGHTS = "weights"  # SGLang's name for the weights' share of its memory
_CHECK, _RELEASE, _RESUME = (
    "check_weights",
    "release_memory_occupation",
    "resume_memory_occupation",
)
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)


def watch_external_updates(receiver: Receiver) -> None:
    """Report weight changes outside of delta sync to this rank's receiver from now on.

    Wraps SGLang's own updates in this process, before its scheduler binds them. SGLang sends each
    such request to every rank, so all receivers get the same reports.
    """
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    kept = not features.enable_memory_saver or features.enable_weights_cpu_backup

    def report(name: str, request: Any) -> None:
        if _resets(name, request):
            receiver.weights_discarded("SGLang's reset of its weights")
        elif name == _RELEASE and _of_weights(request):
            if not kept:
                # The resumed weights belong to no version.
                receiver.weights_discarded("SGLang's release of its weights")
            receiver.weights_released()
        elif name in _UPDATES and getattr(request, "load_format", None) != LOAD_FORMAT:
            receiver.weights_replaced(f"SGLang's {name}")
            if getattr(request, "recapture_cuda_graph", False):
                # A capture fails if another thread allocates memory of the device meanwhile.
                receiver.weights_released()

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reported(updater: Any, request: Any) -> Any:
            report(name, request)
            answer = original(updater, request)
            if getattr(request, "recapture_cuda_graph", False):
                record_released(receiver, updater)
            if (name == _RESUME and _of_weights(request)) or _resets(name, request):
                receiver.weights_returned()
            return answer

        return reported

    for name in (*_UPDATES, _CHECK, _RELEASE, _RESUME):
        updater = weight_updater.SchedulerWeightUpdaterManager
        setattr(updater, name, wrap(name, getattr(updater, name)))


def _resets(name: str, request: Any) -> bool:
    return name == _CHECK and request.action == "reset_tensors"


def record_released(receiver: Receiver, updater: Any) -> None:
    """Record which memory SGLang's updater has released."""
    receiver.set_asleep(_WEIGHTS in updater.offload_tags, other=bool(updater.offload_tags))


def _of_weights(request: Any) -> bool:
    return not request.tags or _WEIGHTS in request.tags
