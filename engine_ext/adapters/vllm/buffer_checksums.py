"""Checksums of tensors that vLLM's own weight checksums leave out, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def buffer_checksums(worker: Any) -> dict[str, str]:
    """Return SHA-256 in hex, by replica, rank and name.

    Covers every registered buffer, the draft model's parameters and buffers, and the slots of
    LoRA adapters, which vLLM does not register.
    """
    prefix = f"dp{worker.parallel_config.data_parallel_index}:rank{worker.rank}:"
    draft, model = worker.get_draft_model(), worker.model_runner.get_model()
    found = list(model.named_buffers())
    if draft is not None:
        found += [(f"draft.{n}", t) for n, t in (*draft.named_parameters(), *draft.named_buffers())]
    for path, module in model.named_modules():
        for slots in ("lora_a_stacked", "lora_b_stacked"):
            stacked = vars(module).get(slots, ())
            found += [(f"{path}.{slots}.{number}", t) for number, t in enumerate(stacked)]
    return {
        prefix + name: hashlib.sha256(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        ).hexdigest()
        for name, tensor in found
        if tensor.numel() and not tensor.is_meta
    }
