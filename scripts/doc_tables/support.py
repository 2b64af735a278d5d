"""Tables of what is supported and refused, and on which versions, as start-up checks it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine_ext.adapters.refusals import Refusal, first
from engine_ext.adapters.sglang import features as sglang_features
from engine_ext.adapters.sglang import refusals as sglang
from engine_ext.adapters.vllm import features as vllm_features
from engine_ext.adapters.vllm import refusals as vllm
from scripts.doc_tables.reference import table

# On every command line: what start-up finds on a user's machine that it refuses nothing for.
_DEFAULTS: Final = {"patched": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """A set-up that users ask about.

    Attributes:
        vllm, sglang: its command line, by attribute of the parsed one.
        loaded: what it is refused for when the model is loaded, if it is.
    """

    name: str
    vllm: Mapping[str, Any] = field(default_factory=dict)
    sglang: Mapping[str, Any] = field(default_factory=dict)
    loaded: tuple[Refusal, ...] = ()


SET_UPS: Final = (
    SetUp(name="tensor parallel", vllm={"tensor_parallel_size": 2}, sglang={"tp_size": 2}),
    SetUp(name="pipeline parallel", vllm={"pipeline_parallel_size": 2}, sglang={"pp_size": 2}),
    SetUp(name="data parallel (vLLM: 0.32)", vllm={"data_parallel_size": 2}, sglang={"dp_size": 2}),
    SetUp(
        name="data parallel, mixture of experts",
        vllm={"data_parallel_size": 2},
        sglang={"dp_size": 2},
        loaded=(vllm.EXPERTS_OF_REPLICAS,),
    ),
    SetUp(
        name="external load balancing",
        vllm={"data_parallel_size": 2, "data_parallel_external_lb": True},
    ),
    SetUp(name="DP attention", sglang={"enable_dp_attention": True}),
    SetUp(name="expert parallel", vllm={"enable_expert_parallel": True}, sglang={"ep_size": 2}),
    SetUp(
        name="EPLB, elastic expert parallel",
        vllm={"enable_eplb": True},
        sglang={"enable_eplb": True},
    ),
    SetUp(name="several hosts", vllm={"nnodes": 2}, sglang={"nnodes": 2}),
    SetUp(
        name="Ray",
        vllm={"distributed_executor_backend": "ray"},
        sglang={"use_ray": True},
    ),
    SetUp(
        name="several HTTP processes (SGLang: with the source patches)",
        vllm={"api_server_count": 2},
        sglang={"tokenizer_worker_num": 2},
    ),
    SetUp(
        name="speculative decoding: draft model, EAGLE, MTP",
        sglang={"speculative_algorithm": "EAGLE"},
    ),
    SetUp(
        name="LoRA adapters and their own tensors",
        vllm={"enable_lora": True},
        sglang={"enable_lora": True},
    ),
    SetUp(name="multimodal models"),
)
_FEATURES: Final = (vllm_features, sglang_features)
_NO_OPTION: Final = {
    "external load balancing": "SGLang",
    "DP attention": "vLLM",
}


def supported() -> str:
    """Return which set-ups the engines start with, with the reason if one does not."""
    rows = [[one.name, *(_cell(one, engine) for engine in ("vLLM", "SGLang"))] for one in SET_UPS]
    return table(["", "vLLM", "SGLang"], rows)


def refused() -> str:
    """Return everything that the engines refuse to start with, and why; a reason has one row."""
    options: dict[tuple[str, str], list[str]] = {}
    for what, engine, why in _refused():
        options.setdefault((engine, why), []).append(what)
    rows = [["<br>".join(found), engine, why] for (engine, why), found in options.items()]
    return table(["option", "engine", "reason"], rows)


def versions() -> str:
    """Return the supported versions of each engine."""
    rows = [[own.VERSIONS.engine, ", ".join(reversed(own.VERSIONS.supported))] for own in _FEATURES]
    return table(["engine", "versions"], rows)


def features() -> str:
    """Return the features that some supported versions lack, and the effect of that."""
    rows = []
    for own in _FEATURES:
        for one in own.FEATURES:
            seen = f"`{one.owner.partition(':')[2] or one.owner.rpartition('.')[2]}.{one.name}`"
            rows.append([one.what, f"{own.VERSIONS.engine} {one.since}", seen, one.without])
    return table(["feature", "since", "recognised by", "without it"], rows)


def _cell(one: SetUp, engine: str) -> str:
    if _NO_OPTION.get(one.name) == engine:
        return "-"
    own, given = (vllm, one.vllm) if engine == "vLLM" else (sglang, one.sglang)
    found = first(argparse.Namespace(**_DEFAULTS, **given), own.ARGUMENTS)
    found = found or next((r for r in one.loaded if r in own.LOADED), None)
    return "yes" if found is None else f"refused: {found.why.partition(';')[0]}"


def _refused() -> Iterator[tuple[str, str, str]]:
    engines = {
        "vLLM": [*vllm.ARGUMENTS, *vllm.RESOLVED, *vllm.LOADED],
        "SGLang": [*sglang.ARGUMENTS, *sglang.LOADED],
    }
    reasons = {name: {r.what: r.why for r in found} for name, found in engines.items()}
    for what, why in reasons["vLLM"].items():
        both = reasons["SGLang"].get(what) == why
        yield _code(what), "both" if both else "vLLM", why
    for what, why in reasons["SGLang"].items():
        if reasons["vLLM"].get(what) != why:
            yield _code(what), "SGLang", why


def _code(what: str) -> str:
    """Return a set-up with its options as code."""
    return re.sub(r"--[\w-]+", r"`\g<0>`", what)
