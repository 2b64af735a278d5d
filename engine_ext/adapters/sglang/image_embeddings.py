"""Image embeddings that SGLang caches and that its own flush does not drop."""

from __future__ import annotations

import torch

# Interpolated position embeddings by the size of the image, and how often each was used: in the
# vision towers of Kimi and PaddleOCR.
_BY_SIZE = ("_interpolated_pos_emb_cache", "cache_position_embedding", "cache_position_count")


def drop(model: torch.nn.Module) -> None:
    """Forget all embeddings of this process; requests in flight compute theirs again.

    They can: a request keeps its processed images until it ends. Call it in the scheduler's thread,
    where no forward pass runs meanwhile.
    """
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
    for module in model.modules():
        for name in _BY_SIZE:
            getattr(module, name, {}).clear()
