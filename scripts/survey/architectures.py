"""The surveyed architectures: text models that vLLM knows, as small as its CPU kernels allow.

Names are those of vLLM's registry and of ``architectures`` in a checkpoint's config. Fields that a
config of transformers does not have are those that published checkpoints have and vLLM reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scripts.live_engine.tiny_models import ATTENTION, COMMON, EXPERTS, GDN, MAMBA, VOCAB_SIZE
from scripts.survey.fields import (
    DENSE,
    FEW_EXPERTS,
    GPT,
    INDEXER,
    LATENT,
    LOCAL_EXPERTS,
    MAMBA_MIXER,
    ROUTED,
    SLIDING,
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A small model of one architecture.

    Attributes:
        config: the name of its config's class in transformers.
        fields: of the config.
        accepted: why a tensor can be refused, by a pattern of names (`fnmatch`).
    """

    config: str
    fields: Mapping[str, Any]
    accepted: Mapping[str, str] = field(default_factory=dict)


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "AfmoeForCausalLM": Architecture(
        "AfmoeConfig",
        {
            **SLIDING,
            **FEW_EXPERTS,
            "moe_intermediate_size": 64,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "ApertusForCausalLM": Architecture("ApertusConfig", DENSE),
    "ArceeForCausalLM": Architecture("ArceeConfig", ATTENTION),
    "BambaForCausalLM": Architecture(
        "BambaConfig", {**DENSE, **MAMBA_MIXER, "attn_layer_indices": [1]}
    ),
    "BitNetForCausalLM": Architecture("BitNetConfig", DENSE),
    "BloomForCausalLM": Architecture(
        "BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "n_layer": 2, "n_head": 4}
    ),
    "CohereForCausalLM": Architecture("CohereConfig", DENSE),
    "Cohere2ForCausalLM": Architecture("Cohere2Config", SLIDING),
    "Cohere2MoeForCausalLM": Architecture("Cohere2MoeConfig", {**SLIDING, **FEW_EXPERTS}),
    "CwmForCausalLM": Architecture("CwmConfig", ATTENTION),
    "DbrxForCausalLM": Architecture(
        "DbrxConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "DeepseekV2Config",
        {**LATENT, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    ),
    "DeepseekV3ForCausalLM": Architecture("DeepseekV3Config", LATENT),
    "DeepseekV32ForCausalLM": Architecture("DeepseekV32Config", {**LATENT, **INDEXER}),
    "Dots1ForCausalLM": Architecture("Dots1Config", {**ATTENTION, **ROUTED}),
    "Ernie4_5ForCausalLM": Architecture("Ernie4_5Config", ATTENTION),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "Ernie4_5_MoeConfig",
        {
            **DENSE,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
        },
    ),
    "Exaone4ForCausalLM": Architecture("Exaone4Config", {**SLIDING, "sliding_window_pattern": 2}),
    "ExaoneMoeForCausalLM": Architecture(
        "ExaoneMoeConfig",
        {
            **SLIDING,
            **FEW_EXPERTS,
            "moe_intermediate_size": 64,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "FalconForCausalLM": Architecture(
        "FalconConfig",
        {**COMMON, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "FalconH1ForCausalLM": Architecture(
        "FalconH1Config", {**ATTENTION, **MAMBA_MIXER, "mamba_d_ssm": 256}
    ),
    "FalconMambaForCausalLM": Architecture("FalconMambaConfig", {**COMMON, "state_size": 16}),
    "FlexOlmoForCausalLM": Architecture("FlexOlmoConfig", {**DENSE, **FEW_EXPERTS}),
    "GemmaForCausalLM": Architecture("GemmaConfig", ATTENTION),
    "Gemma2ForCausalLM": Architecture("Gemma2Config", SLIDING),
    "Gemma3ForCausalLM": Architecture("Gemma3TextConfig", SLIDING),
    "Gemma3nForCausalLM": Architecture(
        "Gemma3nTextConfig",
        {
            **SLIDING,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Gemma4ForCausalLM": Architecture(
        "Gemma4TextConfig",
        {
            **SLIDING,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 0,
        },
    ),
    "GlmForCausalLM": Architecture("GlmConfig", ATTENTION),
    "Glm4ForCausalLM": Architecture("Glm4Config", ATTENTION),
    "Glm4MoeForCausalLM": Architecture("Glm4MoeConfig", {**ATTENTION, **ROUTED}),
    "Glm4MoeLiteForCausalLM": Architecture("Glm4MoeLiteConfig", LATENT),
    "GlmMoeDsaForCausalLM": Architecture("GlmMoeDsaConfig", {**LATENT, **INDEXER}),
    "GPT2LMHeadModel": Architecture("GPT2Config", GPT),
    "GPTBigCodeForCausalLM": Architecture("GPTBigCodeConfig", GPT),
    "GPTJForCausalLM": Architecture("GPTJConfig", {**GPT, "rotary_dim": 16}),
    "GPTNeoXForCausalLM": Architecture(
        "GPTNeoXConfig", {**COMMON, "num_attention_heads": 4, "intermediate_size": 256}
    ),
    "GptOssForCausalLM": Architecture("GptOssConfig", {**SLIDING, **LOCAL_EXPERTS}),
    "GraniteForCausalLM": Architecture("GraniteConfig", DENSE),
    "GraniteMoeForCausalLM": Architecture("GraniteMoeConfig", {**DENSE, **LOCAL_EXPERTS}),
    "GraniteMoeHybridForCausalLM": Architecture(
        "GraniteMoeHybridConfig",
        {
            **DENSE,
            **LOCAL_EXPERTS,
            **MAMBA_MIXER,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "GraniteMoeSharedForCausalLM": Architecture(
        "GraniteMoeSharedConfig", {**DENSE, **LOCAL_EXPERTS, "shared_intermediate_size": 64}
    ),
    "GraniteMoeSWAForCausalLM": Architecture("GraniteMoeSWAConfig", {**DENSE, **LOCAL_EXPERTS}),
    "GraniteSWAForCausalLM": Architecture("GraniteSWAConfig", DENSE),
    "HeliumForCausalLM": Architecture("HeliumConfig", ATTENTION),
    "HrmTextForCausalLM": Architecture("HrmTextConfig", ATTENTION),
    "HunYuanDenseV1ForCausalLM": Architecture("HunYuanDenseV1Config", ATTENTION),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "HunYuanMoEV1Config", {**ATTENTION, "num_experts": 4, "moe_topk": 2}
    ),
    "HYV3ForCausalLM": Architecture(
        "HYV3Config",
        {
            **EXPERTS,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 64,
            "qk_norm": True,
            "route_norm": True,
        },
    ),
    "HyperCLOVAXForCausalLM": Architecture("HyperCLOVAXConfig", ATTENTION),
    "Jais2ForCausalLM": Architecture("Jais2Config", ATTENTION),
    "JambaForCausalLM": Architecture(
        "JambaConfig",
        {
            **DENSE,
            **FEW_EXPERTS,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
    ),
    "LagunaForCausalLM": Architecture(
        "LagunaConfig", {**EXPERTS, "shared_expert_intermediate_size": 64}
    ),
    "Lfm2ForCausalLM": Architecture(
        "Lfm2Config",
        {
            **DENSE,
            "layer_types": ["conv", "full_attention"],
            "block_multiple_of": 64,
            "conv_dim": 128,
            "block_dim": 128,
        },
    ),
    "Lfm2MoeForCausalLM": Architecture(
        "Lfm2MoeConfig",
        {
            **DENSE,
            **FEW_EXPERTS,
            "layer_types": ["conv", "full_attention"],
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
        },
    ),
    "LlamaForCausalLM": Architecture("LlamaConfig", ATTENTION),
    "Llama4ForCausalLM": Architecture(
        "Llama4TextConfig",
        {
            **ATTENTION,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
        },
    ),
    "LongcatFlashForCausalLM": Architecture(
        "LongcatFlashConfig",
        {
            **LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 64,
            "moe_topk": 2,
            "zero_expert_num": 0,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
    ),
    "MambaForCausalLM": Architecture("MambaConfig", {**COMMON, "state_size": 16}),
    "Mamba2ForCausalLM": Architecture("Mamba2Config", {**COMMON, **MAMBA}),
    "MellumForCausalLM": Architecture("MellumConfig", EXPERTS),
    "MiMoV2FlashForCausalLM": Architecture(
        "MiMoV2FlashConfig",
        {
            **SLIDING,
            **ROUTED,
            "v_head_dim": 32,
            "layernorm_epsilon": 1e-5,
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "sliding_window_size": 64,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "add_swa_attention_sink_bias": True,
        },
    ),
    "MiniCPM3ForCausalLM": Architecture(
        "MiniCPM3Config",
        {
            **DENSE,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "MiniMaxM2Config",
        {
            **ATTENTION,
            **LOCAL_EXPERTS,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "Ministral3ForCausalLM": Architecture("Ministral3Config", ATTENTION),
    "MistralForCausalLM": Architecture("MistralConfig", {**ATTENTION, "sliding_window": None}),
    "MixtralForCausalLM": Architecture("MixtralConfig", {**ATTENTION, **LOCAL_EXPERTS}),
    "NemotronForCausalLM": Architecture("NemotronConfig", ATTENTION),
    "NemotronHForCausalLM": Architecture(
        "NemotronHConfig",
        {
            **ATTENTION,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 64,
        },
    ),
    "OlmoForCausalLM": Architecture("OlmoConfig", DENSE),
    "Olmo2ForCausalLM": Architecture("Olmo2Config", DENSE),
    "Olmo3ForCausalLM": Architecture("Olmo3Config", {**DENSE, "sliding_window": 64}),
    "OlmoeForCausalLM": Architecture("OlmoeConfig", {**DENSE, **FEW_EXPERTS}),
    "OlmoHybridForCausalLM": Architecture("OlmoHybridConfig", {**ATTENTION, **GDN}),
    "OPTForCausalLM": Architecture(
        "OPTConfig",
        {**COMMON, "ffn_dim": 256, "num_attention_heads": 4, "word_embed_proj_dim": 128},
    ),
    "PhiForCausalLM": Architecture("PhiConfig", DENSE),
    "Phi3ForCausalLM": Architecture("Phi3Config", DENSE),
    "PhiMoEForCausalLM": Architecture("PhimoeConfig", {**DENSE, **LOCAL_EXPERTS}),
    "Qwen2ForCausalLM": Architecture("Qwen2Config", DENSE),
    "Qwen2MoeForCausalLM": Architecture(
        "Qwen2MoeConfig",
        {
            **DENSE,
            **FEW_EXPERTS,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "Qwen3ForCausalLM": Architecture("Qwen3Config", ATTENTION),
    "Qwen3MoeForCausalLM": Architecture("Qwen3MoeConfig", EXPERTS),
    "Qwen3NextForCausalLM": Architecture("Qwen3NextConfig", {**EXPERTS, **GDN}),
    "Qwen3_5ForCausalLM": Architecture("Qwen3_5TextConfig", {**ATTENTION, **GDN}),
    "Qwen3_5MoeForCausalLM": Architecture("Qwen3_5MoeTextConfig", {**EXPERTS, **GDN}),
    "SeedOssForCausalLM": Architecture("SeedOssConfig", ATTENTION),
    "SmolLM3ForCausalLM": Architecture("SmolLM3Config", DENSE),
    "SolarOpenForCausalLM": Architecture("SolarOpenConfig", {**ATTENTION, **ROUTED}),
    "StableLmForCausalLM": Architecture("StableLmConfig", DENSE),
    "Starcoder2ForCausalLM": Architecture("Starcoder2Config", DENSE),
    "VaultGemmaForCausalLM": Architecture("VaultGemmaConfig", SLIDING),
    "Zamba2ForCausalLM": Architecture(
        "Zamba2Config",
        {
            **DENSE,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_headdim": 32,
            "mamba_ngroups": 2,
            "chunk_size": 64,
            "layers_block_type": ["mamba", "mamba", "hybrid"],
            "hybrid_layer_ids": [2],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
        },
    ),
}
