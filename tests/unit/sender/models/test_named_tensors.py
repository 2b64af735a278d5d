"""A model's tensors are those that transformers itself saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from delta_sender import named_tensors
from engine_ext.files import read_checkpoint
from tests.support.trainer_models import KINDS, assert_same, change, make_model, save, saved


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_that_are_saved(kind: str) -> None:
    model = make_model(kind)
    assert_same(named_tensors(model), saved(model))


@pytest.mark.parametrize("kind", ["dense", "tied", "qwen3_moe"])
def test_the_names_are_planned_again_only_when_they_change(kind: str) -> None:
    model = make_model(kind)
    for seed in (1, 2):
        change(model, seed)
        assert_same(named_tensors(model), saved(model))
    model.register_buffer("more", torch.ones(3))
    assert dict(named_tensors(model))["more"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_loaded_model_gives_back_its_checkpoint(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    folder = save(model, tmp_path)
    loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    assert_same(named_tensors(loaded, folder), dict(read_checkpoint(folder)))


@pytest.mark.parametrize("kind", ["dense", "tied", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_float32_masters_are_cast_to_the_checkpoint_s_dtypes(kind: str, tmp_path: Path) -> None:
    folder = save(make_model(kind), tmp_path / "base")
    masters = make_model(kind, torch.float32)
    change(masters, scale=0.01)
    given = list(named_tensors(masters, folder))
    assert {tensor.dtype for _, tensor in given} == {torch.bfloat16}
    by_dtype = list(named_tensors(masters, dtype=torch.bfloat16))
    assert_same(given, saved(masters.to(torch.bfloat16)))
    assert_same(by_dtype, dict(given))


def test_each_tensor_gets_its_own_dtype_of_the_base(tmp_path: Path) -> None:
    masters = make_model("qwen3_moe", torch.float32)
    base = {
        name: tensor if name.endswith("mlp.gate.weight") else tensor.to(torch.bfloat16)
        for name, tensor in saved(masters).items()
    }
    save_file(base, tmp_path / "model.safetensors")
    assert_same(named_tensors(masters, tmp_path), base)
    assert_same(named_tensors(masters, base), base)


def test_tied_tensors_come_under_every_name_that_the_base_has(tmp_path: Path) -> None:
    model = make_model("tied")
    base = saved(model)
    assert "lm_head.weight" not in base
    both = {**base, "lm_head.weight": base["model.embed_tokens.weight"].clone()}
    assert_same(named_tensors(model, both), both)
    del both["model.embed_tokens.weight"]
    assert_same(named_tensors(model, both), both)


def test_tensors_that_the_class_leaves_out_are_the_base_s() -> None:
    model = make_model("deepseek_v3")
    base = {**saved(model), "model.layers.61.eh_proj.weight": torch.ones(2)}
    assert_same(named_tensors(model, base), base)


def test_another_checkpoint_is_refused() -> None:
    model = make_model("dense")
    base = saved(model)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"up_proj.weight: in the model, but not in the base"):
        named_tensors(model, {n: t for n, t in base.items() if n != name})
    with pytest.raises(ValueError, match=r"other: in the base, but not in the model"):
        named_tensors(model, {**base, "other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"up_proj.weight: \[48, 32\] .* but \[32, 48\] in the b"):
        named_tensors(model, {**base, name: base[name].T})


def test_wrappers_are_looked_through() -> None:
    model = make_model("tied")
    wanted = saved(model)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    compiled: Any = torch.compile(model)
    assert_same(named_tensors(compiled), wanted)
    assert_same(named_tensors(nn.DataParallel(model)), wanted)


def test_any_module_has_the_names_of_its_state_dict() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4), nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    wanted = {n: t for n, t in module.state_dict().items() if n != "1.weight"}
    assert_same(named_tensors(module), wanted)
    cast = dict(named_tensors(module, dtype=torch.float16))
    assert cast["0.weight"].dtype == torch.float16
    assert cast["2.num_batches_tracked"].dtype == torch.int64


def test_what_cannot_be_read_is_refused() -> None:
    model = make_model("dense")
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="quantised"):
        named_tensors(model)
    module = nn.Linear(2, 2)
    module.weight.ds_id = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="weight: DeepSpeed ZeRO-3"):
        named_tensors(module)
    with pytest.raises(ValueError, match="weight: on the meta device"):
        list(named_tensors(nn.Linear(2, 2, device="meta")))
