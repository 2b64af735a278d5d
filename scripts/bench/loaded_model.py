"""A random model of Qwen3's shape, its checkpoint, and a loader like those of vLLM's models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_FUSED: Final = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def make_model(layers: int) -> torch.nn.Module:
    """Return a model with the parameters of Qwen3 as an engine has them, without their values."""
    import torch
    from torch import nn

    from scripts.bench.synthetic_weights import QWEN3_SIZES as sizes

    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes["head_dim"]

    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)

    def layer(*shards: int, columns: int) -> nn.Module:
        module = nn.Module()
        module.weight = weight(sum(shards), columns)
        vars(module)["shards"] = shards
        return module

    def norm(length: int) -> nn.Module:
        module = nn.Module()
        module.weight = weight(length)
        return module

    def block() -> nn.Module:
        block, attention, mlp = nn.Module(), nn.Module(), nn.Module()
        queries, keys = heads * width, kv_heads * width
        attention.qkv_proj = layer(queries, keys, keys, columns=hidden)
        attention.o_proj = layer(hidden, columns=queries)
        attention.q_norm, attention.k_norm = norm(width), norm(width)
        mlp.gate_up_proj, mlp.down_proj = (
            layer(inner, inner, columns=hidden),
            layer(hidden, columns=inner),
        )
        block.self_attn, block.mlp = attention, mlp
        block.input_layernorm, block.post_attention_layernorm = norm(hidden), norm(hidden)
        return block

    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = layer(sizes["vocab_size"], columns=hidden)
    model.model.layers = nn.ModuleList(block() for _ in range(layers))
    model.model.norm = norm(hidden)
    model.lm_head = layer(sizes["vocab_size"], columns=hidden)
    return model


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a checkpoint's tensors into the model, as the loaders of vLLM's models do."""
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            *path, last, kind = name.split(".")
            fused, shard = _FUSED.get(last, (last, 0))
            target = ".".join([*path, fused, kind])
            parameter = parameters[target]
            shards = getattr(model.get_submodule(target.rpartition(".")[0]), "shards", None)
            if shards is None:
                parameter.data.copy_(tensor)
            else:
                parameter.data.narrow(0, sum(shards[:shard]), shards[shard]).copy_(tensor)


def checkpoint_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the model's weights under the names and shapes that a checkpoint has."""
    import torch

    parts: Mapping[str, list[str]] = {
        fused: [name for name, (other, _) in _FUSED.items() if other == fused]
        for fused, _ in _FUSED.values()
    }
    for name, parameter in model.named_parameters():
        *path, last, kind = name.split(".")
        shards = getattr(model.get_submodule(name.rpartition(".")[0]), "shards", None)
        sizes = [len(parameter)] if shards is None else list(shards)
        pieces = torch.split(parameter.data, sizes)
        for one, piece in zip(parts.get(last, [last]), pieces, strict=True):
            yield ".".join([*path, one, kind]), piece.clone()


def write_checkpoint(model: torch.nn.Module, folder: Path) -> None:
    """Give the model random weights, and write them as a checkpoint of several files."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape).mul_(0.02))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(checkpoint_of(model)):
        files.setdefault(f"{number // 100:05}.safetensors", {})[name] = tensor
    for file_name, tensors in files.items():
        save_file(tensors, folder / file_name)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, as vLLM's reader of safetensors does."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
