"""The weights of every step of the soak, and the log probabilities that they give to tokens.

The weights of a step depend on its number alone, so that the trainer, the one that replaces it, and
the check have the same ones. Steps differ most in the output head: a token of another step has
another log probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

_HEAD: Final = "lm_head.weight"
_CHANGED: Final = 0.02  # share of the other tensors' elements


def weights(base: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return name -> tensor at a step; step 0 is the base."""
    if step == 0:
        return dict(base)
    generator, found = torch.Generator().manual_seed(step), {}
    for name, tensor in base.items():
        if name == _HEAD:
            found[name] = (torch.randn(tensor.shape, generator=generator) / 4).to(tensor.dtype)
            continue
        changed = tensor.clone()
        bits = changed.view(-1).view(torch.int16)
        count = max(1, round(_CHANGED * bits.numel()))
        where = torch.randperm(bits.numel(), generator=generator)[:count]
        bits[where] ^= torch.randint(1, 4, (count,), generator=generator).to(torch.int16)
        found[name] = changed
    return found


class Reference:
    """The model in float32 by transformers, at any step.

    Args:
        folder: of the base checkpoint.
        base: its tensors.
    """

    def __init__(self, folder: Path, base: Mapping[str, torch.Tensor]) -> None:
        import transformers

        torch.set_num_threads(1)
        self._base, self._step = base, 0
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def logprobs(self, step: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log probability of each token that follows a prompt, by a step's weights."""
        if step != self._step:
            self._model.load_state_dict(weights(self._base, step), strict=False)
            self._step = step
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = ids[0, len(prompt) :, None]
        found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return found
