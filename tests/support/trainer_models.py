"""Tiny models as trainers hold them, and what transformers saves of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from engine_ext.files import read_checkpoint

Tensors = dict[str, torch.Tensor]

_COMMON: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED: Final = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "dense": lambda: transformers.Qwen3Config(**_COMMON, head_dim=8),
    "tied": lambda: transformers.Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=True),
    "biases": lambda: transformers.Qwen2Config(**_COMMON),
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_COMMON, **_EXPERTS, head_dim=8),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_COMMON, **_EXPERTS, shared_expert_intermediate_size=16
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_COMMON, num_experts=4),
    "granite_moe": lambda: transformers.GraniteMoeConfig(**_COMMON, num_local_experts=4),
    "jamba": lambda: transformers.JambaConfig(**_COMMON, num_experts=2),
    "gpt_oss": lambda: transformers.GptOssConfig(**_COMMON, num_local_experts=4, head_dim=8),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**_COMMON, **_MLA}, **_ROUTED),
}
KINDS: Final = tuple(_CONFIGS)


def make_vision_model(dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """Return a tiny Gemma 3 with vision and random weights, the same each time."""
    config = transformers.Gemma3Config(
        text_config={**_COMMON, "head_dim": 8},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Gemma3ForConditionalGeneration(config).to(dtype)


def make_model(
    kind: str, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> transformers.PreTrainedModel:
    """Return a model with random weights, the same each time."""
    made = _CONFIGS[kind]()
    for name, value in config.items():
        setattr(made, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)


def change(model: nn.Module, seed: int = 1, scale: float = 0.1) -> None:
    """Give every tensor that is trained, or this rank's shard of it, other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                noise = torch.randn(held.shape, generator=generator, dtype=torch.float32)
                held += (noise * scale).to(held.dtype)


def saved(model: Any) -> Tensors:
    """Return the tensors that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in read_checkpoint(folder)}


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(
    given: Iterable[tuple[str, torch.Tensor]], wanted: Mapping[str, torch.Tensor]
) -> None:
    """Fail unless names, each given once, shapes, dtypes and bytes are those of `wanted`."""
    pairs = list(given)
    tensors = dict(pairs)
    assert len(pairs) == len(tensors)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        got = tensors[name]
        assert (name, got.dtype, got.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(bits(got), bits(tensor)), name
