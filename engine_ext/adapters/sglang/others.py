"""What else in SGLang changes weights: its own updates, and releasing the weights' memory.

After one of these nobody knows what a delta would be added to. SGLang may serve what it has then,
but only a full sync is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from engine_ext.adapters.sglang.hooks import LOAD_FORMAT
from engine_ext.errors import BaseMismatch
from engine_ext.ranks import Ranks
from engine_ext.receiver import Receiver

_WEIGHTS = "weights"  # SGLang's name for the weights' share of its memory
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)


class OtherChanges:
    """Knows whether something else has changed one rank's weights since the last sync.

    SGLang sends each such request to every rank, so all ranks know the same.

    Args:
        receiver: the rank's; its state learns when the weights are lost.
        ranks: this rank among the engine's.
    """

    def __init__(self, receiver: Receiver, ranks: Ranks) -> None:
        self._receiver = receiver
        self._ranks = ranks
        self._cause: str | None = None

    def watch(self) -> None:
        """Wrap SGLang's own updates in this process, before its scheduler binds them."""
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager as Updater,
        )

        for name in _UPDATES:
            setattr(Updater, name, self._noting(name, getattr(Updater, name)))
        Updater.check_weights = self._noting_a_reset(Updater.check_weights)
        Updater.release_memory_occupation = self._noting_release(Updater.release_memory_occupation)

    def check(self, operation: str, arguments: dict[str, Any]) -> None:
        """Refuse what builds on weights that are not there any more.

        Raises:
            BaseMismatch: only a full sync can be taken.
        """
        if self._cause is None:
            return
        if operation == "rollback" or (operation == "begin" and not arguments["part"]["full"]):
            raise BaseMismatch(
                f"the weights are of no version that is known here, after {self._cause}; "
                "send a full sync"
            )

    def committed(self) -> None:
        """A sync was committed; it was a full one if `check` was in the way of others."""
        self._cause = None

    def _note(self, cause: str) -> None:
        self._cause = cause
        self._receiver.handle("drop", {})

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(updater: Any, request: Any) -> Any:
            if getattr(request, "load_format", None) == LOAD_FORMAT:
                return original(updater, request)
            before = self._cause
            self._note(f"SGLang's {name}")
            output = original(updater, request)
            if not output.success and self._unchanged():
                self._cause = before
            return output

        return update

    def _unchanged(self) -> bool:
        """Whether a failed update has left every rank's weights alone; all ranks must call it."""
        found = self._receiver.handle("digest", {"scan": True})
        digests = found.get("ok", {})
        mine = "ok" in found and digests["tensors"] == digests["tracked"]
        return all(self._ranks.all_gather(mine))

    def _noting_a_reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def check_weights(updater: Any, request: Any) -> Any:
            if request.action == "reset_tensors":
                self._note("SGLang's reset of its weights")
            return original(updater, request)

        return check_weights

    def _noting_release(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from sglang.srt.runtime_context import get_exec

        features = get_exec().features
        kept = not features.enable_memory_saver or features.enable_weights_cpu_backup

        @functools.wraps(original)
        def release_memory_occupation(updater: Any, request: Any) -> Any:
            if not kept and (not request.tags or _WEIGHTS in request.tags):
                # What comes back is not what any version was.
                self._receiver.state.uncertain = True
            return original(updater, request)

        return release_memory_occupation
