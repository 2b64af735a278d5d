"""Make vLLM keep copies of MLA's projections when imported, as it does for quantised weights.

For other weights vLLM keeps views. ``--worker-extension-cls`` imports this module in every worker
before the model is built.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import mla_attention

_original = mla_attention.get_and_maybe_dequant_weights


def _dequantise(*args: Any, **kwargs: Any) -> Any:
    return _original(*args, **kwargs).clone()


mla_attention.get_and_maybe_dequant_weights = _dequantise


class Copies:
    """A worker extension without methods."""
