"""Checksums of a vLLM's weights, for versions that have no route for them.

vLLM imports this module in every worker (``--worker-extension-cls``), also without delta updates.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class WeightChecksums:
    """A worker extension of vLLM."""

    rank: int
    model_runner: Any

    def weight_checksums(self) -> dict[str, str]:
        """Return SHA-256 of every parameter of this rank's model, by rank and name."""
        return {
            f"rank{self.rank}:{name}": hashlib.sha256(
                parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            ).hexdigest()
            for name, parameter in self.model_runner.get_model().named_parameters()
        }
