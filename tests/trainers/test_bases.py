"""Checkpoints whose names or forms are not what a config says, with each of the plug-ins."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from accelerate.utils.modeling import get_state_dict_offloaded_model
from trl.generation import vllm_generation

from delta_sender import checkpoint_names, named_tensors
from delta_sender.diff.quantize import FORMS
from delta_sender.integrations.transformers_callback import DeltaSyncCallback
from delta_sender.integrations.trl_trainers import DeltaWeightTransfer, use_deltas
from engine_ext.files import read_checkpoint
from tests.support.fake_engine import Engine
from tests.support.quantised_models import quantised, save_quantised
from tests.support.trainer_models import (
    assert_same,
    change,
    make_model,
    make_vision_model,
    save,
    saved,
)
from tests.trainers.test_transformers_callback import trainer_of

Send = Callable[[Iterator[tuple[str, torch.Tensor]]], None]


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that TRL sends: the parameters that need a gradient."""
    return ((n, p.detach()) for n, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_fused_names_in_the_checkpoint(kind: str, tmp_path: Path) -> None:
    made = make_model(kind)
    made.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name, _ in read_checkpoint(tmp_path))
    engine = Engine.of(dict(read_checkpoint(tmp_path)))
    model = type(made).from_pretrained(tmp_path, dtype=torch.float32)
    transfer = DeltaWeightTransfer("http://e", tmp_path, client=engine.client())
    transfer.init_weight_transfer()
    change(model, scale=0.01)
    transfer.send_weights(trained(model))
    assert engine.holds(saved(model.to(torch.bfloat16)))
    transfer.destroy()


def test_a_vision_language_checkpoint_with_frozen_vision(tmp_path: Path) -> None:
    made = make_vision_model()
    folder = save(made, tmp_path)
    engine = Engine.of(dict(read_checkpoint(folder)))
    model = type(made).from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "language_model" in name
    transfer = DeltaWeightTransfer("http://e", folder, frozen=True, client=engine.client())
    transfer.init_weight_transfer()
    change(model, scale=0.01)
    transfer.send_weights(trained(model))
    assert engine.holds(saved(model.to(torch.bfloat16)))
    transfer.destroy()


def test_a_text_class_is_refused_with_the_class_to_load(tmp_path: Path) -> None:
    folder = save(make_vision_model(), tmp_path)
    engine = Engine.of(dict(read_checkpoint(folder)))
    model = transformers.Gemma3ForCausalLM.from_pretrained(folder)
    said = (
        r"model.embed_tokens.weight: in the model, but not in the base; the model is a "
        r"Gemma3ForCausalLM, the checkpoint one of Gemma3ForConditionalGeneration: load it with "
        r"transformers.Gemma3ForConditionalGeneration.from_pretrained\("
    )
    for base in (folder, dict(read_checkpoint(folder))):
        with pytest.raises(ValueError, match=said):
            named_tensors(model, base)
    transfer = DeltaWeightTransfer("http://e", folder, frozen=True, client=engine.client())
    transfer.init_weight_transfer()
    with pytest.raises(ValueError, match=r"as transformers\.Gemma3ForConditionalGeneration$"):
        transfer.send_weights(trained(model))
    assert engine.version == 0
    transfer.destroy()


@pytest.mark.parametrize(
    ("through", "form"), [*(("transfer", form) for form in FORMS), ("client", "fp8_block")]
)
def test_trl_with_a_quantised_base(
    through: str, form: str, tmp_path: Path, trl_client: None
) -> None:
    base = save_quantised(make_model("qwen3_moe"), form, tmp_path)
    engine = Engine.of(dict(read_checkpoint(base)))
    model = make_model("qwen3_moe", torch.float32)
    change(model, scale=0.01)
    if through == "transfer":
        transfer = DeltaWeightTransfer("http://e", base, quantize=form, client=engine.client())
        transfer.init_weight_transfer()
        transfer.send_weights(trained(model))
        transfer.destroy()
    else:
        use_deltas(base, quantize=form, client=engine.client())
        client = vllm_generation.VLLMClient(base_url="http://e")
        client.init_communicator(device=torch.device("cpu"))
        client.update_named_params([], trained(model))
        client.close_communicator()
    assert engine.version == 1
    assert engine.holds(quantised(model, form))


def test_the_callback_with_a_quantised_base(tmp_path: Path) -> None:
    form = "int8_channel"
    made = make_model("qwen3_moe")
    base = save_quantised(made, form, tmp_path / "quantised")
    engine = Engine.of(dict(read_checkpoint(base)))
    model = type(made).from_pretrained(save(made, tmp_path / "plain"), dtype=torch.float32)
    callback = DeltaSyncCallback("http://e", base, quantize=form, client=engine.client())
    trainer_of(model, callback, tmp_path, steps=2).train()
    assert engine.version == 3
    assert engine.holds(quantised(model, form))
    assert not engine.holds(quantised(made, form))


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_a_model_that_was_loaded_dequantised(kind: str, tmp_path: Path) -> None:
    base = save_quantised(make_model(kind), "fp8_block", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    assert_same(named_tensors(model, base, quantize="fp8_block"), dict(read_checkpoint(base)))
    change(model, scale=0.01)
    plain = make_model(kind, torch.float32)
    plain.load_state_dict(model.state_dict())
    assert_same(named_tensors(model, base, quantize="fp8_block"), quantised(plain, "fp8_block"))


@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_a_model_that_is_offloaded_is_refused_with_the_way_out(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    base = save(model, tmp_path)
    change(model)
    wanted = saved(model)
    with tempfile.TemporaryDirectory() as folder:
        accelerate.disk_offload(model, folder, execution_device="cpu")
        with pytest.raises(ValueError, match=r"accelerate has offloaded it: .*checkpoint_names"):
            named_tensors(model, base)
        whole = get_state_dict_offloaded_model(model)
        assert_same(checkpoint_names(whole.items(), model, base), wanted)
