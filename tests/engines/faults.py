"""A vLLM worker extension that makes the next write of one rank fail half-way.

Given to a server with ``--worker-extension-cls``, called by its development RPC route.
"""

from __future__ import annotations

from typing import Any


class FailingLoader:
    """Worker methods; `self` is the worker."""

    def fail_next_load(self, rank: str) -> str:
        """Let the model's next ``load_weights`` on this rank raise after one tensor."""
        worker: Any = self
        if worker.rank != int(rank):
            return "other rank"
        model = worker.model_runner.get_model()
        original = model.load_weights

        def load_weights(weights: Any) -> object:
            model.load_weights = original
            original(iter([next(iter(weights))]))
            raise OSError("the loader lost its connection")

        model.load_weights = load_weights
        return "armed"
