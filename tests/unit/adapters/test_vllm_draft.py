"""The draft model of vLLM's speculative decoding, with stand-ins for vLLM."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.refusals import Refusal
from engine_ext.adapters.target_and_draft import TargetAndDraft
from engine_ext.adapters.vllm import draft, refusals
from engine_ext.adapters.vllm.draft import ModelRole
from engine_ext.adapters.vllm.layerwise_reload import active_wrapper
from engine_ext.ranks import replicas

pytestmark = pytest.mark.slow


def _of_type(model_type: str) -> Any:
    return SimpleNamespace(model_type=model_type)


def config(**fields: Any) -> Any:
    """vLLM's configuration; `fields` are of the speculative one, and those of `_OTHERS`."""
    others = {name: fields.pop(name) for name in [*fields] if name in _OTHERS}
    model = SimpleNamespace(model="target", revision=None, dtype=torch.bfloat16)
    own = SimpleNamespace(
        model="draft", revision=None, dtype=torch.bfloat16, hf_config=_of_type("qwen3")
    )
    speculative = {
        "method": "draft_model",
        "draft_model_config": own,
        "parallel_drafting": False,
        **fields,
    }
    return SimpleNamespace(
        model_config=model,
        load_config="load",
        lora_config=others.get("lora_config"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=others.get("stages", 1)),
        speculative_config=SimpleNamespace(**speculative),
    )


_OTHERS = ("lora_config", "stages")


@pytest.mark.parametrize("speculative", [None, "ngram", "ngram_gpu", "suffix"])
def test_without_draft_weights_the_model_is_alone(speculative: str | None) -> None:
    chosen = config(method=speculative)
    if speculative is None:
        chosen.speculative_config = None
    assert draft.roles(chosen) == [ModelRole("", "", True, chosen.model_config, "load")]


def test_a_checkpoint_of_its_own_has_a_prefix() -> None:
    chosen = config()
    own = chosen.speculative_config.draft_model_config
    assert draft.roles(chosen) == [
        ModelRole("target", "", True, chosen.model_config, "load"),
        ModelRole("draft", "draft.", True, own, "load"),
    ]


def test_the_targets_checkpoint_is_read_once() -> None:
    chosen = config(method="mtp")
    chosen.speculative_config.draft_model_config.model = "target"
    assert draft.roles(chosen)[1] == ModelRole("draft", "", False, chosen.model_config, "load")


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"method": "medusa"}, refusals.DRAFT_METHOD),
        ({"method": "custom_class"}, refusals.DRAFT_METHOD),
        *(
            ({"draft_model_config": SimpleNamespace(hf_config=kind)}, refusals.DRAFT_ARCHITECTURE)
            for kind in map(_of_type, ("gemma4_mtp", "step3p5_mtp", "step5_mtp"))
        ),
        ({"draft_lm_head_quantization": "fp8"}, refusals.DRAFT_HEAD),
        ({"parallel_drafting": True}, refusals.DRAFT_IN_PARALLEL),
        (
            {"draft_model_config": SimpleNamespace(dtype=torch.float16, hf_config=_of_type("x"))},
            refusals.DRAFT_DTYPE,
        ),
        ({"lora_config": object()}, refusals.DRAFT_WITH_LORA),
        ({"stages": 2}, refusals.DRAFT_WITH_STAGES),
    ],
)
def test_what_is_not_known_to_be_reached_is_refused(
    fields: dict[str, Any], refusal: Refusal
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(refusal.message)):
        draft.roles(config(**fields))


def test_replicas_with_draft_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "count", lambda: 2)
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_WITH_REPLICAS.message)):
        draft.roles(config())


def test_the_drafter_loads_within_the_context_only() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def hooks() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    class Drafter:
        def load_model(self, target: object) -> None:
            entered.append(f"loads for {target}")

    runner = SimpleNamespace(drafter=Drafter())
    with draft.around_load(runner, hooks()):
        runner.drafter.load_model("target")
    runner.drafter.load_model("another")
    assert entered == ["in", "loads for target", "out", "loads for another"]


def test_eagle_head_shares_an_equal_embedding() -> None:
    head: Any = nn.Module()
    assert draft.always_shares(head)
    head.has_own_embed_tokens = True
    assert not draft.always_shares(head)


def test_a_reload_of_either_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.model_loader.reload.layerwise"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(LAYERWISE_INFO={}))
    both = TargetAndDraft(nn.Linear(1, 1), nn.Linear(1, 1), "draft.")
    assert active_wrapper(both) is None
    both.draft._do_torchao_reload = True  # type: ignore[assignment]
    assert active_wrapper(both) is not None
