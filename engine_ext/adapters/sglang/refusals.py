"""Configurations with which SGLang does not start while delta updates are enabled."""

from __future__ import annotations

from typing import Final

from engine_ext.adapters.refusals import (
    Condition,
    Refusal,
    above_one,
    enabled,
    equal,
    given,
    other_than,
)

_MOVING: Final = "experts move between the ranks"
_KEEPS_KV: Final = (
    "after a sync a prompt could be answered from KV of old weights, as no test has shown that "
    "SGLang's flush of the cache drops all of it; leave the option out"
)
_NO_ENDPOINTS: Final = "it has no delta endpoints; use the plain HTTP server"
_ORDER: Final = "replicas must get calls in the same order"
_NO_REPLICAS: Final = "its ranks are no replicas of one another"
_LORA: Final = "LoRA layers rename the weights"

_NO_DRAFT: Final = ("none", "ngram")
_FOLLOWED: Final = ("eagle", "eagle3", "nextn", "standalone")
_DRAFT: Final = Condition(
    "speculative_algorithm", lambda value: str(value).lower() not in _NO_DRAFT, "EAGLE"
)

DRAFT_MODEL: Final = Refusal(
    "another --speculative-algorithm than EAGLE, EAGLE3, NEXTN, NGRAM and STANDALONE",
    "the draft model's weights would stay as they are",
    (
        Condition(
            "speculative_algorithm",
            lambda value: str(value).lower() not in (*_NO_DRAFT, *_FOLLOWED),
            "DFLASH",
        ),
    ),
)
DRAFT_WITH_STAGES: Final = Refusal(
    "a draft model and --pp-size above 1",
    "only the last stage has the draft model",
    (_DRAFT, above_one("pp_size")),
)
DRAFT_WITH_REPLICAS: Final = Refusal(
    "a draft model and --dp-size above 1",
    "they are not tested together",
    (_DRAFT, above_one("dp_size")),
)

# Settings of the command line, or that SGLang derives from it and from the model.
RESOLVED: Final = (
    Refusal(
        "--enable-multi-layer-eagle, which SGLang sets itself for some models with EAGLE",
        "it loads several draft models",
        (enabled("enable_multi_layer_eagle"),),
    ),
    Refusal("--enable-hierarchical-cache", _KEEPS_KV, (enabled("enable_hierarchical_cache"),)),
    Refusal(
        "--hicache-storage-backend",
        _KEEPS_KV,
        (enabled("hicache_storage_backend"),),
        shown="hicache_storage_backend",
    ),
    Refusal("--enable-lmcache", _KEEPS_KV, (enabled("enable_lmcache"),)),
    Refusal("--enable-flexkv", _KEEPS_KV, (enabled("enable_flexkv"),)),
    Refusal(
        "--radix-cache-backend",
        _KEEPS_KV,
        (enabled("radix_cache_backend"),),
        shown="radix_cache_backend",
    ),
    Refusal(
        "--enable-unified-cache-external-linker",
        _KEEPS_KV,
        (enabled("enable_unified_cache_external_linker"),),
    ),
    Refusal("--enable-hisparse", _KEEPS_KV, (enabled("enable_hisparse"),)),
    Refusal(
        "--disaggregation-mode",
        "KV of old weights might be on its way between the two engines during a sync",
        (other_than("disaggregation_mode", "null"),),
        shown="disaggregation_mode",
    ),
    Refusal(
        "--offload-group-size",
        "copies of layers go to the GPU ahead of their use, and a copy made before a sync has old "
        "weights",
        (Condition("offload_group_size", lambda value: (value or 0) > 0, 2),),
    ),
    Refusal(
        "--load-format ipc_cache",
        "the weights are the memory of a daemon, which several engines share",
        (equal("load_format", "ipc_cache"),),
    ),
)

ARGUMENTS: Final = (
    DRAFT_MODEL,
    DRAFT_WITH_STAGES,
    DRAFT_WITH_REPLICAS,
    *RESOLVED,
    Refusal(
        "--speculative-token-map",
        "the draft model has a copy of some rows of the target's output head",
        (given("speculative_token_map"),),
    ),
    Refusal(
        "--speculative-moe-runner-backend",
        "its processing is not repeated exactly",
        (given("speculative_moe_runner_backend"),),
    ),
    Refusal(
        "--speculative-moe-a2a-backend",
        "its processing is not repeated exactly",
        (given("speculative_moe_a2a_backend"),),
    ),
    Refusal("DP attention", _NO_REPLICAS, (enabled("enable_dp_attention"),)),
    Refusal("--attn-dp-size above 1", _NO_REPLICAS, (above_one("attn_dp_size"),)),
    Refusal(
        "--dp-size and --tokenizer-worker-num",
        _ORDER,
        (above_one("dp_size"), above_one("tokenizer_worker_num")),
    ),
    Refusal(
        "--pp-size and --enable-pdmux",
        "pipeline stages cannot meet in the loop that SGLang runs then",
        (above_one("pp_size"), enabled("enable_pdmux")),
    ),
    Refusal(
        "several hosts and --dp-size",
        "replicas vote by a store on the host that they share",
        (above_one("nnodes"), above_one("dp_size")),
    ),
    Refusal(
        "several hosts and --tokenizer-worker-num",
        "they are not tested together",
        (above_one("nnodes"), above_one("tokenizer_worker_num")),
    ),
    Refusal("--enable-lora", _LORA, (enabled("enable_lora"),)),
    Refusal("--lora-paths", _LORA, (enabled("lora_paths"),)),
    Refusal(
        "--weight-cache-mode",
        "the weights belong to several engines",
        (other_than("weight_cache_mode", "off"),),
    ),
    Refusal("--enable-eplb", _MOVING, (enabled("enable_eplb"),)),
    Refusal("--elastic-ep-backend", _MOVING, (other_than("elastic_ep_backend", "none"),)),
    Refusal(
        "--load-format flash_rl",
        "its loader quantises; --quantization fp8 alone works",
        (equal("load_format", "flash_rl"),),
    ),
    Refusal(
        "--enable-amd-monokernel",
        "its kernels keep copies of the weights",
        (enabled("enable_amd_monokernel"),),
    ),
    Refusal(
        "--enable-nvidia-megakernel",
        "what its kernels keep of the weights is not known",
        (enabled("enable_nvidia_megakernel"),),
    ),
    Refusal(
        "--enable-paged-experts",
        "the GPU keeps copies of experts that are in host memory",
        (enabled("enable_paged_experts"),),
    ),
    Refusal(
        "--kt-weight-path",
        "experts on the CPU come from files of their own, and would stay as they are",
        (given("kt_weight_path"),),
    ),
    Refusal(
        "--enable-torch-compile on CPU",
        "the compiled graph keeps copies of the weights",
        (enabled("enable_torch_compile"), enabled("on_cpu")),
    ),
    Refusal(
        "--language-only",
        "image embeddings come from servers with other weights",
        (enabled("language_only"),),
    ),
    Refusal(
        "--mm-enable-dp-encoder",
        "ranks that share out the images are not tested",
        (enabled("mm_enable_dp_encoder"),),
    ),
    Refusal(
        "SGLANG_VIT_ENABLE_CUDA_GRAPH",
        "the graphs of some vision towers keep what they compute from the weights",
        (enabled("vision_graphs"),),
    ),
    Refusal("--encoder-only", _NO_ENDPOINTS, (enabled("encoder_only"),)),
    Refusal("--smg-grpc-mode", _NO_ENDPOINTS, (enabled("smg_grpc_mode"),)),
    Refusal("--grpc-mode", _NO_ENDPOINTS, (enabled("grpc_mode"),)),
    Refusal("--use-ray", _NO_ENDPOINTS, (enabled("use_ray"),)),
    Refusal("SGLANG_RUST_SERVER", _NO_ENDPOINTS, (enabled("rust_server"),)),
    Refusal("--enable-http2", _NO_ENDPOINTS, (enabled("enable_http2"),)),
    Refusal(
        "--tokenizer-worker-num above 1 without the source patches",
        "those processes load no plugins; apply the source patches (patches/README.md)",
        (above_one("tokenizer_worker_num"), Condition("patched", lambda value: not value, False)),
    ),
)

LATE_WEIGHTS: Final = Refusal(
    "weights that are loaded while it serves", "they are certified before it serves"
)
DRAFT_TOKEN_MAP: Final = Refusal(
    "an EAGLE-3 head with a vocabulary of its own (d2t)",
    "SGLang computes a table from it, and keeps a copy",
)
DRAFT_COPIES: Final = Refusal(
    "a draft model that SGLang gives copies of the target's tensors",
    "the copies would stay as they are",
)
DRAFT_DTYPE: Final = Refusal(
    "a draft model of another dtype than the target's", "its processing is not repeated exactly"
)
DRAFT_WITHOUT_CHECKPOINT: Final = Refusal(
    "a draft model and dummy weights", "the first full sync would not reach the draft model"
)
LOADED: Final = (LATE_WEIGHTS, DRAFT_TOKEN_MAP, DRAFT_COPIES, DRAFT_DTYPE, DRAFT_WITHOUT_CHECKPOINT)
