"""Importing this makes vLLM keep copies of MLA's projections, as of weights it has to dequantise.

Those of a weight that is not quantised are views of it otherwise. A server is given the class with
``--worker-extension-cls``, and so imports it in every worker before the model is made.
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
