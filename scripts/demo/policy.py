"""The trainer of the demo: a small policy, a reward, and REINFORCE on sampled completions."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from scripts.live_engine import tiny_models

_CONFIG: Final = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "initializer_range": 0.04,
}
# Two properties of a trained model: hidden states share a direction, and the output distribution
# is peaked. Without both, steps of 1e-6 do not change the reward visibly.
_SHARED_DIRECTION_STD: Final = 0.1
_OUTPUT_GAIN: Final = 5.0


@dataclass(frozen=True)
class Sample:
    """One completion: the engine's token ids, and the reward of its text."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    reward: float


def build_policy(directory: Path, *, seed: int) -> Path:
    """Write the Qwen3-style model that the demo starts from (about 3 million parameters)."""
    with tempfile.TemporaryDirectory() as scratch:
        untrained = tiny_models.build("qwen3", Path(scratch), seed=seed, **_CONFIG)
        return tiny_models.save_checkpoint(untrained, directory, _peaked(untrained, seed))


def _peaked(untrained: Path, seed: int) -> dict[str, torch.Tensor]:
    """Load a random checkpoint; add a shared direction and a peaked output."""
    tensors = tiny_models.load_tensors(untrained)
    generator = torch.Generator().manual_seed(seed)
    embedding = tensors["model.embed_tokens.weight"]
    shared = torch.randn(embedding.shape[1], generator=generator) * _SHARED_DIRECTION_STD
    tensors["model.embed_tokens.weight"] = (embedding.float() + shared).bfloat16()
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * _OUTPUT_GAIN
    return tensors


def reward(text: str) -> float:
    """Return the share of lowercase ASCII letters in the text; 0 for an empty one."""
    return sum("a" <= character <= "z" for character in text) / max(1, len(text))


class Trainer:
    """A bf16 policy with fp32 master weights, like those of RL trainers.

    Args:
        directory: Checkpoint to start from.
        learning_rate: AdamW's. A step moves each weight by about this much, so it decides how
            many weights round to another bf16 value.
        seed: Of the bits that the masters have beyond bf16's.

    Attributes:
        model: The live bf16 model, to sample from.
    """

    def __init__(self, directory: Path, *, learning_rate: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self._working: list[torch.Tensor] = list(self.model.parameters())
        self._masters = [_master(weight.detach(), generator) for weight in self._working]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the bf16 weights by checkpoint name; they are views of the live model."""
        return dict(self.model.state_dict())

    def step(self, samples: Sequence[Sample]) -> None:
        """Do one REINFORCE step; the baseline is the mean reward of the same prompt's samples."""
        ids, mask = _padded(samples)
        logits = self.model(ids[:, :-1]).logits.float()
        log_probs = -torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        weighted = log_probs * mask * _advantages(samples).unsqueeze(1)
        loss = -weighted.sum() / mask.sum()
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for master, working in zip(self._masters, self._working, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for master, working in zip(self._masters, self._working, strict=True):
                working.copy_(master)


def _master(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return an fp32 master for a bf16 weight, drawn from the values that round to it.

    A widened weight would be in the middle of them, so that small steps change almost no bf16
    weight for a long time, then many at once. In a real training run the masters are spread.
    """
    spacing = (weight.view(torch.int16) + 1).view(torch.bfloat16).float() - weight.float()
    return weight.float() + (torch.rand(weight.shape, generator=generator) - 0.5) * spacing


def _padded(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids int64 [samples, length], and a completion mask float [samples, length-1]."""
    length = max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    mask = torch.zeros(len(samples), length - 1)
    for row, sample in enumerate(samples):
        tokens = [*sample.prompt_ids, *sample.completion_ids]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(sample.prompt_ids) - 1 : len(tokens) - 1] = 1.0
    return ids, mask


def _advantages(samples: Sequence[Sample]) -> torch.Tensor:
    """Return rewards less their prompt's mean, over the batch's deviation; float [samples]."""
    rewards = torch.tensor([sample.reward for sample in samples])
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(tuple(sample.prompt_ids), []).append(row)
    advantages = torch.empty_like(rewards)
    for rows in groups.values():
        advantages[rows] = rewards[rows] - rewards[rows].mean()
    return advantages / (rewards.std(correction=0) + 1e-6)
