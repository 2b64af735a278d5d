"""Checkpoints of target and draft models, for both engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.live_engine import tiny_models

DRAFT = "draft."

Tensors = dict[str, torch.Tensor]


def normal(*shape: int) -> torch.Tensor:
    """Return small random numbers."""
    return (0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(7))).bfloat16()


def mtp_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors of MiMo's MTP layer."""
    return {name: tensor for name, tensor in tensors.items() if ".mtp_layers." in name}


def changed(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """Return a copy in which one element in fifty has the other sign."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone()
        chosen = torch.randperm(tensor.numel(), generator=generator)[: -(-tensor.numel() // 50)]
        found[name].view(-1)[chosen] *= -1
    return found


def named(target: Mapping[str, torch.Tensor], draft: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors of both checkpoints by the names that a sync has for them."""
    return {**target, **{DRAFT + name: tensor for name, tensor in draft.items()}}


def replaced(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Write other tensors into a checkpoint's folder, and return them."""
    kept = {name: tensor.clone() for name, tensor in tensors.items()}  # they map the old file
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kept


def with_mtp(base: Path, layer: str, new: str, extra: Mapping[str, torch.Tensor]) -> Tensors:
    """Add a copy of a layer to a checkpoint under another name, with more tensors.

    Args:
        layer, new: what the names of the layer's tensors begin with, and those of its copy.
        extra: by their names after that.
    """
    tensors = tiny_models.load_tensors(base)
    own = {n.removeprefix(layer): t for n, t in tensors.items() if n.startswith(layer)}
    added = {new + name: tensor for name, tensor in {**own, **extra}.items()}
    return replaced(base, {**tensors, **added})


def eagle_head(folder: Path, architecture: str | None = None, *, bias: bool = False) -> Tensors:
    """Write the checkpoint of an EAGLE head: one layer, and the fusing of hidden states.

    Args:
        bias: whether the fusing has one.
    """
    layer = {
        name.removeprefix("model."): tensor
        for name, tensor in _one_layer(folder, architecture).items()
        if name.startswith("model.layers.") and not name.endswith("input_layernorm.weight")
    }
    (hidden,) = layer["layers.0.post_attention_layernorm.weight"].shape
    fused = {"fc.weight": normal(hidden, 2 * hidden)}
    return replaced(folder, {**layer, **fused, **({"fc.bias": normal(hidden)} if bias else {})})


def eagle3_head(folder: Path, *, vocabulary: int | None = None) -> Tensors:
    """Write the checkpoint of an EAGLE-3 head, which fuses hidden states of three layers.

    Args:
        vocabulary: how many of the target's tokens it drafts; None for all.
    """
    fields = {"draft_vocab_size": vocabulary or tiny_models.ATTENTION["vocab_size"]}
    own = _one_layer(folder, "LlamaForCausalLMEagle3", **fields)
    prefix = "model.layers.0."
    head = {n.replace(prefix, "midlayer."): t for n, t in own.items() if n.startswith(prefix)}
    (hidden,) = head["midlayer.input_layernorm.weight"].shape
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = len(head[f"midlayer.self_attn.{name}.weight"])
        head[f"midlayer.self_attn.{name}.weight"] = normal(rows, 2 * hidden)
    head["midlayer.hidden_norm.weight"] = normal(hidden)
    head |= {"fc.weight": normal(hidden, 3 * hidden), "norm.weight": own["model.norm.weight"]}
    head["lm_head.weight"] = normal(fields["draft_vocab_size"], hidden)
    if vocabulary is not None:
        head["d2t"] = torch.arange(vocabulary) % 2
    return replaced(folder, head)


def _one_layer(folder: Path, architecture: str | None, **fields: Any) -> Tensors:
    fields = {**tiny_models.ATTENTION, "num_hidden_layers": 1, **fields}
    tiny_models.write("LlamaConfig", fields, folder, seed=1, architecture=architecture)
    return tiny_models.load_tensors(folder)


def mimo(folder: Path) -> Tensors:
    """Write the checkpoint of a MiMo model with its MTP layer."""
    fields = {**tiny_models.ATTENTION, "tie_word_embeddings": False, "num_nextn_predict_layers": 1}
    tiny_models.write("Qwen2Config", fields, folder, architecture="MiMoForCausalLM")
    hidden = fields["hidden_size"]
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    extra = {f"{name}.weight": normal(hidden) for name in norms}
    extra["input_proj.weight"] = normal(hidden, 2 * hidden)
    return with_mtp(folder, "model.layers.0.", "model.mtp_layers.0.", extra)
