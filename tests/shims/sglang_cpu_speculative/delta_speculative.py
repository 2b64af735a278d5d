"""A plugin of SGLang that lets it generate with a draft model on a CPU without SGLang's kernels.

Attention is SGLang's own for PyTorch, which gets the number of verified tokens. It works with one
drafted token at a time (``--speculative-num-steps 1 --speculative-eagle-topk 1``).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch


def register() -> None:
    """Let that attention verify drafted tokens; SGLang calls this in each of its processes."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    original = TorchNativeAttnBackend.forward_extend

    @functools.wraps(original)
    def forward_extend(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if batch.forward_mode.is_target_verify():
            batch = _verified(batch)
        return original(backend, q, k, v, layer, batch, *args, **kwargs)

    TorchNativeAttnBackend.forward_extend = forward_extend
    # The draft model's runner has its own backend, which extends as the target's does.
    DraftBackendFactory.create_draft_extend_backend = lambda factory: None


def _verified(batch: Any) -> Any:
    """Return a batch whose drafted tokens extend what is cached."""
    extended = copy.copy(batch)
    count = batch.spec_info.draft_token_num
    extended.seq_lens = batch.seq_lens + count
    extended.extend_prefix_lens = batch.seq_lens
    extended.extend_seq_lens = torch.full_like(batch.seq_lens, count)
    return extended
