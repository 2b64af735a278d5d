"""Build small random Hugging Face models without a hub, for the tests, demo and benchmarks.

A model folder has what an engine needs to serve: a config, bf16 safetensors weights with the
names of a real checkpoint of that architecture, a generation config and a byte-level BPE
tokenizer. Every tensor is random, norms and biases too: a misplaced tensor of ones would look
like the right one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine_ext.conformance import random_weights
from engine_ext.format import Digest, tensor_digest
from engine_ext.kernels import bits_of, host_bits

VOCAB_SIZE: Final = 384
EOS_TOKEN: Final = "<|endoftext|>"
PAD_TOKEN: Final = "<|pad|>"

_CORPUS: Final = (
    "the quick brown fox jumps over the lazy dog and runs back into the forest at night",
    "a reward is a number that tells a policy how well it did, and a policy learns from it",
    "weights change a little after every step; most of them keep their exact bytes",
    "Once upon a time there was a small model that wanted to write lowercase letters.",
    "The trainer sends what changed, the engine writes it, and generation goes on.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "In 2024 there were 365 days and 12 months; 100 % of them had at least 28 days.",
)

# Sizes of every architecture: two layers, heads that two ranks can split, aligned widths.
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
ATTENTION: Final[dict[str, Any]] = {
    **COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
}
EXPERTS: Final[dict[str, Any]] = {
    **ATTENTION,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
# vLLM has CPU kernels for these head sizes and those of MLA only.
GDN: Final[dict[str, Any]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: Final = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 64}
# The names that hybrids of attention and Mamba2 have for the sizes of the latter.
_HYBRID: Final[dict[str, Any]] = {
    **ATTENTION,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
MLA: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    # SGLang's only rotary embedding for this architecture on CPU.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "first_k_dense_replace": 1,
    # Fields of the published config that transformers leaves out and SGLang reads.
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
}
# Names of config classes in transformers, which is imported late: it takes seconds.
_KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3": ("Qwen3Config", {**ATTENTION, "tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {**ATTENTION, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3TextConfig", {**ATTENTION, "sliding_window": 64}),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **GDN}),
    "mamba2": ("Mamba2Config", {**COMMON, **MAMBA}),
    "falcon_h1": ("FalconH1Config", {**_HYBRID, "mamba_d_ssm": 256, "mamba_rms_norm": True}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_HYBRID,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**ATTENTION, **MLA}),
}


def build(kind: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of one architecture and return its folder.

    Args:
        kind: One of `_KINDS`.
        directory: Where to write; created if needed.
        seed: Of the weights, with `kind` and `overrides`.
        **overrides: Fields of the architecture's Hugging Face config.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}; known are {', '.join(_KINDS)}")
    config_class, fields = _KINDS[kind]
    return write(config_class, {**fields, **overrides}, directory, seed=seed)


def write(
    config_class: str,
    fields: Mapping[str, Any],
    directory: Path,
    *,
    architecture: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a random model of any transformers config and return its folder.

    Args:
        config_class: Its name in transformers.
        fields: Of the config; the special tokens' ids are the tokenizer's if they are not given.
        directory: Where to write; created if needed.
        architecture: Its name in the config, if it is not that of the class in transformers.
        seed: Of the weights, with the config.
    """
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": pad}
    config = getattr(transformers, config_class)(**{**ids, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        random_weights.jitter_constants(model)
    model.generation_config = transformers.GenerationConfig(**ids)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if architecture is not None:
        path = directory / "config.json"
        saved = {**json.loads(path.read_text()), "architectures": [architecture]}
        path.write_text(json.dumps(saved, indent=2))
    return directory


def build_tokenizer(**named: str) -> Any:
    """Train a byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens, the same every time.

    Args:
        **named: Further special tokens, by the names under which a processor looks for them.
    """
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, PAD_TOKEN, *named.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    missing = VOCAB_SIZE - core.get_vocab_size()
    core.add_special_tokens([f"<|unused_{i}|>" for i in range(missing)])
    tokens = {"bos_token": EOS_TOKEN, "eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=512, model_specific_special_tokens=named, **tokens
    )


def add_head(directory: Path, head: torch.Tensor | None = None) -> Path:
    """Give a tied checkpoint an output head of its own, as some published ones have; return it.

    Args:
        directory: Its weights are in one file.
        head: None for a copy of the embedding.
    """
    tensors = {name: tensor.clone() for name, tensor in load_tensors(directory).items()}
    tensors["lm_head.weight"] = (
        tensors["model.embed_tokens.weight"].clone() if head is None else head
    )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of a checkpoint folder, by checkpoint name, in the files' order.

    Raises:
        FileNotFoundError: The folder has no safetensors file.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    if not tensors:
        raise FileNotFoundError(f"no safetensors file in {directory}")
    return tensors


def save_checkpoint(base_dir: Path, target_dir: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write `tensors` as a checkpoint with the config and tokenizer of `base_dir`.

    Raises:
        ValueError: A name, shape or dtype differs from the base checkpoint's, or both folders
            are the same (loaded tensors are mapped from the files).
    """
    if base_dir.resolve() == target_dir.resolve():
        raise ValueError(f"cannot write over {base_dir}, which is read from")
    expected = _signature(load_tensors(base_dir))
    found = _signature(tensors)
    if found != expected:
        names = sorted(n for n in expected.keys() | found if expected.get(n) != found.get(n))
        raise ValueError(f"not the tensors of {base_dir}: {', '.join(names)}")
    target_dir.mkdir(parents=True, exist_ok=True)
    for file in base_dir.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, target_dir / file.name)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target_dir / "model.safetensors", metadata={"format": "pt"})
    return target_dir


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of all tensors in hex, as an engine's status has it."""
    flat = ((name, host_bits(bits_of(one.reshape(-1)))) for name, one in tensors.items())
    return Digest.total(tensor_digest(name, bits) for name, bits in flat).hex()


def _signature(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
