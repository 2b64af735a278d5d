"""Fields that the configs of several surveyed architectures have."""

from __future__ import annotations

from typing import Any, Final

from scripts.live_engine.tiny_models import ATTENTION, MLA, VOCAB_SIZE

# Heads of the usual size: hidden_size / num_attention_heads.
DENSE: Final[dict[str, Any]] = {n: v for n, v in ATTENTION.items() if n != "head_dim"}
SLIDING: Final[dict[str, Any]] = {**ATTENTION, "sliding_window": 64}
LOCAL_EXPERTS: Final[dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FEW_EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: Final[dict[str, Any]] = {
    **DENSE,
    **{n: v for n, v in MLA.items() if n != "rope_scaling"},
}
INDEXER: Final[dict[str, Any]] = {"index_topk": 64, "index_head_dim": 64, "index_n_heads": 2}
GPT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 512,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
}
MAMBA_MIXER: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}
