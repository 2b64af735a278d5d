"""Adapters are merged as PEFT's own `merge_and_unload` does, and the model stays as it is."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from delta_sender import checkpoint_names, named_tensors
from tests.support.trainer_models import assert_same, bits, change, make_model, saved

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("dense", {"target_modules": "all-linear"}),
    "dora": ("dense", {"target_modules": "all-linear", "use_dora": True}),
    "rslora_embedding_head": (
        "dense",
        {
            "target_modules": ["q_proj", "embed_tokens"],
            "use_rslora": True,
            "modules_to_save": ["lm_head"],
        },
    ),
    "tied_head_untied": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied": ("tied", {"target_modules": ["q_proj", "down_proj"]}),
    "tokens": ("dense", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}),
    "biases": ("biases", {"target_modules": ["q_proj"], "bias": "all"}),
    "lora_bias": ("biases", {"target_modules": ["q_proj"], "lora_bias": True}),
    "fused_experts": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


def adapted(case: str, dtype: torch.dtype = torch.bfloat16) -> peft.PeftModel:
    kind, config = CASES[case]
    model = peft.get_peft_model(make_model(kind, dtype), peft.LoraConfig(r=4, **config))
    change(model)
    return model


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.bfloat16) for case in ("lora", "dora", "fused_experts")),
    ],
)
def test_merged_tensors_are_those_of_merge_and_unload(case: str, dtype: torch.dtype) -> None:
    model = adapted(case, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = [(name, tensor.clone()) for name, tensor in named_tensors(model)]
    after = model.state_dict()
    assert all(torch.equal(bits(after[name]), bits(t)) for name, t in before.items())
    assert_same(given, saved(model.merge_and_unload()))


def test_adapted_model_gives_its_trained_buffers() -> None:
    """A stream of merged weights leaves buffers out, also those of a copy that is trained."""
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = make_model("deepseek_v3")
    weights = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    wanted = saved(model)
    names = make_model("deepseek_v3").to("meta")
    config = peft.LoraConfig(target_modules=["q_b_proj"], modules_to_save=["gate"])
    wrapped: Any = torch.compile(peft.get_peft_model(model, config))
    for name, buffer in wrapped.named_buffers():
        if "modules_to_save" in name:
            buffer += 0.5
    wanted[bias] = wanted[bias] + 0.5
    assert_same(checkpoint_names(weights, names, live=wrapped), wanted)


def test_the_active_adapter_counts() -> None:
    model = adapted("lora")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    change(model, seed=5)
    given = [(name, tensor.clone()) for name, tensor in named_tensors(model)]
    model.set_adapter("default")
    default = {name: tensor.clone() for name, tensor in named_tensors(model)}
    assert any(not torch.equal(tensor, default[name]) for name, tensor in given)
    model.set_adapter("other")
    assert_same(given, saved(model.merge_and_unload()))


def test_merged_adapters_are_not_merged_twice() -> None:
    model = adapted("lora")
    model.merge_adapter()
    given = [(name, tensor.clone()) for name, tensor in named_tensors(model)]
    assert_same(given, saved(model.merge_and_unload()))


def test_adapters_of_transformers_itself_are_merged() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(make_model("dense", torch.float32), config)
    torch.manual_seed(0)
    model = make_model("dense", torch.float32)
    model.add_adapter(config)
    change(wrapped)
    change(model)
    assert_same(named_tensors(model), saved(wrapped.merge_and_unload()))


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
def test_adapters_on_tied_tensors_are_refused() -> None:
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"])
    model = peft.get_peft_model(make_model("tied"), config)
    with pytest.raises(ValueError, match="untie them"):
        named_tensors(model)


def test_prompts_are_refused() -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("dense"), config)
    with pytest.raises(ValueError, match="PromptTuningConfig: prompts cannot be merged"):
        named_tensors(model)
