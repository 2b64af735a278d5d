"""A trainer's model under the names of a quantised base, quantised in its own precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from delta_sender import DeltaSender, checkpoint_names, named_tensors, sync_model
from delta_sender.diff.quantize import FORMS
from engine_ext.files import read_checkpoint
from tests.support.fake_engine import Engine
from tests.support.quantised_models import quantised, save_quantised
from tests.support.trainer_models import assert_same, change, make_model, saved


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [
        *(("qwen3_moe", form, torch.float32) for form in FORMS),
        ("qwen3_moe", "int8_channel", torch.bfloat16),
        ("tied", "fp8_block", torch.bfloat16),
        ("tied", "fp8_channel", torch.float32),
    ],
)
def test_weights_are_quantised_as_the_trainer_has_them(
    kind: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = save_quantised(make_model(kind), form, tmp_path)
    model = make_model(kind, dtype)
    change(model, scale=0.01)
    wanted = quantised(model, form)
    assert_same(named_tensors(model, base, quantize=form), wanted)
    assert_same(named_tensors(model, dict(read_checkpoint(base)), quantize=form), wanted)
    assert_same(checkpoint_names(model.named_parameters(), model, base, quantize=form), wanted)
    rounded = quantised(model.to(torch.bfloat16), form)
    is_rounded = all(torch.equal(t.float(), wanted[n].float()) for n, t in rounded.items())
    assert is_rounded == (dtype == torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_synced_with_a_quantised_engine(form: str, tmp_path: Path) -> None:
    base = save_quantised(make_model("qwen3_moe"), form, tmp_path)
    engine = Engine.of(dict(read_checkpoint(base)))
    model = make_model("qwen3_moe", torch.float32)
    with DeltaSender("http://e", base, client=engine.client(), quantize=form) as sender:
        for seed in (1, 2):
            change(model, seed, scale=0.01)
            report = sync_model(sender, model, base, quantize=form)
            assert not report.full
            assert engine.holds(quantised(model, form))
    sync_model(None, model, quantize=form)  # a rank without the sender


def test_frozen_weights_keep_their_scales(tmp_path: Path) -> None:
    base = save_quantised(make_model("qwen3_moe"), "fp8_block", tmp_path)
    model = make_model("qwen3_moe", torch.float32)
    change(model, scale=0.01)
    some = ((n, t) for n, t in model.named_parameters() if "layers.0." not in n)
    given = checkpoint_names(some, model, base, frozen=True, quantize="fp8_block")
    held = dict(read_checkpoint(base))
    wanted = {
        name: held[name] if "layers.0." in name else tensor
        for name, tensor in quantised(model, "fp8_block").items()
    }
    assert_same(given, wanted)


def test_what_is_missing_for_a_quantised_base_is_said(tmp_path: Path) -> None:
    base = save_quantised(make_model("dense"), "int8_channel", tmp_path)
    model = make_model("dense")
    with pytest.raises(ValueError, match=r"weight_scale: .*; .* take quantize='int8_channel'"):
        named_tensors(model, base)
    with pytest.raises(ValueError, match="no weight in the form fp8_block"):
        named_tensors(model, base, quantize="fp8_block")
    with pytest.raises(ValueError, match="quantize= needs the quantised checkpoint as base"):
        named_tensors(model, quantize="int8_channel")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj.weight: NaN and infinity"):
        list(named_tensors(model, base, quantize="int8_channel"))


def test_a_base_without_quantised_weights_is_as_before() -> None:
    model = make_model("dense")
    base = saved(model)
    with pytest.raises(ValueError, match="no weight in the form"):
        named_tensors(model, base, quantize="fp8_block")
