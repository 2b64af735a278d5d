"""Read the live weights of a real vLLM's workers: a worker extension (``--worker-extension-cls``).

It knows nothing of delta updates: only the model that the worker serves.
"""

from __future__ import annotations

from typing import Any, ClassVar

from scripts.freeze.recording import Memory, changes, memory_of

EXTENSION = f"{__name__}.WorkerMemory"


class WorkerMemory:
    """Two methods for ``/collective_rpc``."""

    rank: int
    model_runner: Any
    _freeze_before: ClassVar[Memory] = {}

    def freeze_remember(self) -> bool:
        """Copy every parameter and buffer of this rank's model."""
        WorkerMemory._freeze_before = self._freeze_memory()
        return True

    def freeze_changes(self) -> dict[str, Any]:
        """Return the changes since then, by rank and name; see `recording.changes`."""
        found = changes(WorkerMemory._freeze_before, self._freeze_memory())
        return {f"rank{self.rank}:{name}": row for name, row in found.items()}

    def _freeze_memory(self) -> Memory:
        model = self.model_runner.get_model()
        named = dict(model.named_parameters(remove_duplicate=False))
        return memory_of({**named, **dict(model.named_buffers(remove_duplicate=False))})
