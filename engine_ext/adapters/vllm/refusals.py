"""Configurations with which vLLM does not start while delta updates are enabled."""

from __future__ import annotations

from typing import Any, Final

from engine_ext.adapters.refusals import (
    Condition,
    Refusal,
    above_one,
    enabled,
    equal,
    given,
    other_than,
)

_REPLICAS: Final = above_one("data_parallel_size")
_SEPARATE: Final = (
    "each server has replicas of its own then; start them as separate engines, without data "
    "parallelism, and give the sender all of their URLs"
)
_MOVING: Final = "experts move between the ranks"
_NO_ENDPOINTS: Final = "it has no delta endpoints; use the Python HTTP server"
_HOSTS: Final = above_one("nnodes")
_RAY: Final = enabled("on_ray")
_ONE_HOST: Final = "replicas vote by a store on the host that they share"
_UNTESTED: Final = "they are not tested together"


def _has_class(config: Any) -> bool:
    """Return whether a configuration of the encoder cache, parsed or not, names its class."""
    name = "encoder_cache_manager_cls"
    return bool(config.get(name) if isinstance(config, dict) else getattr(config, name, None))


FREEZING: Final = Refusal(
    "inductor's freezing (--compilation-config, TORCHINDUCTOR_FREEZING)",
    "compiled code keeps constants that it has made of weights",
    (enabled("freezes_weights"),),
)
ARGUMENTS: Final = (
    Refusal(
        "--data-parallel-external-lb", _SEPARATE, (_REPLICAS, enabled("data_parallel_external_lb"))
    ),
    Refusal(
        "--data-parallel-hybrid-lb", _SEPARATE, (_REPLICAS, enabled("data_parallel_hybrid_lb"))
    ),
    Refusal(
        "--data-parallel-multi-port-external-lb",
        _SEPARATE,
        (_REPLICAS, enabled("data_parallel_multi_port_external_lb")),
    ),
    Refusal("--data-parallel-rank", _SEPARATE, (_REPLICAS, given("data_parallel_rank"))),
    Refusal(
        "--data-parallel-start-rank", _SEPARATE, (_REPLICAS, given("data_parallel_start_rank"))
    ),
    Refusal(
        "--data-parallel-size-local below --data-parallel-size",
        "replicas on other hosts are not reached",
        (_REPLICAS, enabled("replicas_elsewhere")),
    ),
    Refusal(
        "--data-parallel-backend ray",
        "only mp is tested",
        (_REPLICAS, other_than("data_parallel_backend", "mp")),
    ),
    Refusal(
        "several API servers for several replicas",
        "all replicas must get the calls in the same order; add --api-server-count 1",
        (_REPLICAS, above_one("api_server_count")),
    ),
    Refusal(
        "--data-parallel-size above 1 on vLLM 0.31",
        "it returns the answers of the first replica alone; vLLM 0.32 returns all",
        (_REPLICAS, enabled("one_replica_answers")),
    ),
    Refusal("--enable-eplb", _MOVING, (enabled("enable_eplb"),)),
    Refusal("--enable-elastic-ep", _MOVING, (enabled("enable_elastic_ep"),)),
    *(
        Refusal(f"{hosts} and {option}", why, (spans_hosts, condition))
        for hosts, spans_hosts in (("several hosts", _HOSTS), ("Ray", _RAY))
        for option, why, condition in (
            ("--data-parallel-size", _ONE_HOST, _REPLICAS),
            ("several API servers", _UNTESTED, above_one("api_server_count")),
            ("--enable-lora", _UNTESTED, enabled("enable_lora")),
            ("--weight-transfer-config", _UNTESTED, given("weight_transfer_config")),
        )
    ),
    Refusal(
        "Ray and VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
        "only vLLM's newer executor for Ray, its default, is tested",
        (_RAY, enabled("ray_executor_v1")),
    ),
    Refusal("--headless on one host", _NO_ENDPOINTS, (enabled("headless_alone"),)),
    Refusal(
        "this --distributed-executor-backend",
        "only mp, ray and uni are tested",
        (other_than("distributed_executor_backend", "mp", "ray", "uni"),),
    ),
    Refusal(
        "--ec-transfer-config",
        "the connector keeps image embeddings of old weights",
        (given("ec_transfer_config"),),
    ),
    Refusal(
        "a class of its own in --ec-manager-config",
        "it might keep image embeddings of old weights",
        (Condition("ec_manager_config", _has_class, {"encoder_cache_manager_cls": "some.Class"}),),
    ),
    Refusal(
        "--mm-encoder-only",
        "engines that get its embeddings keep those of old weights",
        (enabled("mm_encoder_only"),),
    ),
    Refusal(
        "--mm-encoder-attn-dtype fp8 without --mm-encoder-fp8-scale-path",
        "the encoder's scales follow from images that it has seen with old weights",
        (enabled("encoder_learns_scales"),),
    ),
    FREEZING,
    Refusal("the Rust front end", _NO_ENDPOINTS, (enabled("rust_frontend"),)),
    Refusal("--grpc", _NO_ENDPOINTS, (enabled("grpc"),)),
)

# Checked in a `VllmConfig`, see `engine_ext.adapters.vllm.hooks.check_config`.
RESOLVED: Final = (
    Refusal(
        "a KV connector with the role kv_producer or kv_consumer",
        "KV of old weights might be on its way between the two engines during a sync",
        (other_than("kv_role", "kv_both"),),
        shown="kv_role",
    ),
    Refusal(
        "a KV connector (--kv-transfer-config, --kv-offloading-size)",
        "it keeps KV of old weights: no test has shown of any connector that vLLM's reset of the "
        "prefix cache drops all that it keeps; start without it",
        (given("kv_connector"),),
        shown="kv_connector",
    ),
    Refusal(
        "--load-format ipc_cache",
        "the weights are the memory of a daemon, which several engines share",
        (equal("load_format", "ipc_cache"),),
    ),
    Refusal(
        "--offload-group-size, --offload-backend prefetch",
        "copies of layers go to the GPU ahead of their use, and a copy made before a sync has old "
        "weights",
        (enabled("prefetches_layers"),),
    ),
    Refusal(
        "a model that scores by late interaction (ColBERT, ColQwen and others)",
        "a sync drops the query that vLLM keeps for the documents, and the engine dies of that; "
        "add --no-enable-flash-late-interaction",
        (enabled("keeps_queries"),),
    ),
    Refusal(
        'prefix caching and LLM(load_format="delta")',
        "without a server, nothing drops KV of old weights; give enable_prefix_caching=False",
        (enabled("caches_without_server"),),
    ),
    Refusal(
        "VLLM_ENABLE_STARTUP_PLAN",
        "a plan that was recorded without delta updates gives the KV cache the memory that they "
        "need",
        (enabled("startup_plan"),),
    ),
)

EXPERTS_OF_REPLICAS: Final = Refusal(
    "--data-parallel-size and a mixture of experts",
    "the experts' places over all replicas are not proven",
)
LORA_WITH_DEFERRED_ATTENTION: Final = Refusal(
    "--enable-lora for a model with MLA",
    "attention keeps what it computes from layers that adapters change",
)
EXPERT_SUBSTITUTION: Final = Refusal(
    "experts that a checkpoint replaces by constants",
    "vLLM's loader of their values cannot be traced",
)
_DRAFT: Final = "the draft model's weights would stay as they are"
DRAFT_METHOD: Final = Refusal(
    "another method of --speculative-config than draft_model, eagle, mtp, ngram and suffix", _DRAFT
)
DRAFT_ARCHITECTURE: Final = Refusal("MTP layers of Gemma 4, Step 3.5 and Step 5", _DRAFT)
DRAFT_HEAD: Final = Refusal(
    "draft_lm_head_quantization in --speculative-config",
    "the draft's quantised copy of the output head would stay as it is",
)
DRAFT_IN_PARALLEL: Final = Refusal(
    "parallel drafting", "what the drafter computes from weights would stay as it is"
)
DRAFT_DTYPE: Final = Refusal(
    "a draft model of another dtype than the target's", "its processing is not repeated exactly"
)
DRAFT_WITH_LORA: Final = Refusal("a draft model and --enable-lora", _UNTESTED)
DRAFT_WITH_STAGES: Final = Refusal(
    "a draft model and --pipeline-parallel-size above 1", "only the last stage has the draft model"
)
DRAFT_WITH_REPLICAS: Final = Refusal("a draft model and --data-parallel-size above 1", _UNTESTED)
DRAFT_WITHOUT_CHECKPOINT: Final = Refusal(
    "a draft model and dummy weights", "the first full sync would not reach the draft model"
)
LOADED: Final = (
    EXPERTS_OF_REPLICAS,
    LORA_WITH_DEFERRED_ATTENTION,
    EXPERT_SUBSTITUTION,
    DRAFT_METHOD,
    DRAFT_ARCHITECTURE,
    DRAFT_HEAD,
    DRAFT_IN_PARALLEL,
    DRAFT_DTYPE,
    DRAFT_WITH_LORA,
    DRAFT_WITH_STAGES,
    DRAFT_WITH_REPLICAS,
    DRAFT_WITHOUT_CHECKPOINT,
)
