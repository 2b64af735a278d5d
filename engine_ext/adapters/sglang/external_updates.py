"""Weight changes outside of delta sync: SGLang's own updates, and releasing the weights' memory.

After one of these the base of a delta is unknown, and a failed one may have written some of the
weights. SGLang may serve what it has then, but only a full sync is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from engine_ext.adapters.sglang.names import LOAD_FORMAT
from engine_ext.receiver import Receiver

_WEIGHTS = "weights"  # SGLang's name for the weights' share of its memory
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)


class ExternalUpdates:
    """Reports weight changes outside of delta sync to one rank's receiver.

    SGLang sends each such request to every rank, so all receivers get the same reports.

    Args:
        receiver: the rank's receiver.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def watch(self) -> None:
        """Wrap SGLang's own updates in this process, before its scheduler binds them."""
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager as Updater,
        )

        for name in _UPDATES:
            setattr(Updater, name, self._wrap_update(name, getattr(Updater, name)))
        Updater.check_weights = self._wrap_check(Updater.check_weights)
        Updater.release_memory_occupation = self._wrap_release(Updater.release_memory_occupation)

    def _wrap_update(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(updater: Any, request: Any) -> Any:
            if getattr(request, "load_format", None) == LOAD_FORMAT:
                return original(updater, request)
            self._receiver.weights_replaced(f"SGLang's {name}")
            return original(updater, request)

        return update

    def _wrap_check(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def check_weights(updater: Any, request: Any) -> Any:
            if request.action == "reset_tensors":
                self._receiver.weights_replaced("SGLang's reset of its weights")
            return original(updater, request)

        return check_weights

    def _wrap_release(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from sglang.srt.runtime_context import get_exec

        features = get_exec().features
        kept = not features.enable_memory_saver or features.enable_weights_cpu_backup

        @functools.wraps(original)
        def release_memory_occupation(updater: Any, request: Any) -> Any:
            if not request.tags or _WEIGHTS in request.tags:
                if not kept:
                    # What comes back is of no version.
                    self._receiver.weights_replaced("SGLang's release of its weights")
                self._receiver.weights_released()
            return original(updater, request)

        return release_memory_occupation
