"""Deltas of a real training run for the benchmarks: REINFORCE on the demo's policy, on the CPU."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from scripts.demo.policy import Sample, Trainer, build_policy
from scripts.live_engine import tiny_models

_PROMPTS: Final = 4
_SAMPLES: Final = 4  # completions of a prompt
_PROMPT_TOKENS: Final = 4
_COMPLETION_TOKENS: Final = 12


@dataclass(frozen=True)
class Training:
    """One step of a training run.

    Attributes:
        learning_rate: AdamW's.
        old, new: name -> bf16 bit patterns [numel] before and after the step.
    """

    learning_rate: float
    old: dict[str, NDArray[np.uint16]]
    new: dict[str, NDArray[np.uint16]]

    @property
    def density(self) -> float:
        """Return changed elements / elements of the model."""
        changed = sum(int(np.count_nonzero(self.new[n] != old)) for n, old in self.old.items())
        return changed / sum(old.size for old in self.old.values())


def train(learning_rate: float, steps: int, *, seed: int = 0) -> Training:
    """Train some steps and return the last one. AdamW changes more weights in the first ones.

    Tokens are sampled from the policy itself; the reward of a completion is the share of its
    tokens in the lower half of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        policy = build_policy(Path(scratch) / "policy", seed=seed)
        trainer = Trainer(policy, learning_rate=learning_rate, seed=seed)
        before: dict[str, NDArray[np.uint16]] = {}
        for _ in range(steps):
            before = _bits(trainer)
            trainer.step(_samples(trainer.model, generator))
        return Training(learning_rate, before, _bits(trainer))


def _bits(trainer: Trainer) -> dict[str, NDArray[np.uint16]]:
    """Copy the trainer's weights."""
    return {
        name: tensor.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
        for name, tensor in trainer.tensors().items()
    }


def _samples(model: Any, generator: torch.Generator) -> list[Sample]:
    shape = (_PROMPTS, _PROMPT_TOKENS)
    prompts = torch.randint(tiny_models.VOCAB_SIZE, shape, generator=generator)
    ids = prompts.repeat_interleave(_SAMPLES, 0)
    with torch.no_grad():
        for _ in range(_COMPLETION_TOKENS):
            likely = model(ids).logits[:, -1].float().softmax(-1)
            ids = torch.cat([ids, torch.multinomial(likely, 1, generator=generator)], 1)
    rows = ids.tolist()
    return [
        Sample(row[:_PROMPT_TOKENS], row[_PROMPT_TOKENS:], _reward(row[_PROMPT_TOKENS:]))
        for row in rows
    ]


def _reward(tokens: list[int]) -> float:
    return sum(token < tiny_models.VOCAB_SIZE // 2 for token in tokens) / len(tokens)
