"""A sync shows a trainer's mistakes: no change, NaN, values that are rounded."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import DeltaSender, SyncError, checkpoint_names, named_tensors
from engine_ext.dtypes import TORCH_DTYPE, torch_bits_dtype
from tests.support.fake_engine import (
    Engine,
    Model,
    copied,
    error,
    model_of,
    sender_of,
    sends,
    train,
)
from tests.support.trainer_models import change, make_model, saved

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if words in text]


def test_syncs_without_a_change_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    counts, said = [], [""]
    for step in range(10):
        if step == 5:
            train(model)
        counts.append(sender.sync(model.items()).unchanged_in_a_row)
        said = warnings(caplog, "no value has changed in 3 syncs in a row")
        assert len(said) == (step >= 2) + (step >= 8)
    assert counts == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    for cause in ("optimizer that steps copies", "adapter that is not merged", "only the base's"):
        assert cause in said[0]
    sender.sync_full(model.items())
    assert sender.sync(model.items()).unchanged_in_a_row == 6


def test_a_change_that_does_not_arrive_is_a_change() -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults[0] = sends(error(507, "SpoolFull"))
    train(model)
    with pytest.raises(SyncError):
        sender.sync(model.items())
    assert sender.sync(model.items()).unchanged_in_a_row == 0
    assert engine.holds(model)


@pytest.mark.parametrize(("after", "said"), [(0, 0), (1, 1), (5, 0)])
def test_the_warning_comes_when_asked_for(
    after: int, said: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Also for a delta log that engines follow."""
    model = model_of(tensors=1)
    engine = Engine.of(model)
    options: dict[str, Any] = {"unchanged_warning": after}
    for sender in (
        sender_of(engine, model, **options),
        DeltaSender(tmp_path / "log", model.items(), **options),
    ):
        caplog.clear()
        for number in (1, 2):
            assert sender.sync(model.items()).unchanged_in_a_row == number
        assert len(warnings(caplog, "no value has changed")) == said


def patterns(dtype: str) -> tuple[list[int], list[int]]:
    """Return bit patterns of a dtype that are NaN or infinite, and finite ones next to them."""
    if dtype == "float8_e8m0fnu":
        return [0xFF], [0xFE]
    if dtype == "float8_e4m3fn":
        return [0x7F, 0xFF], [0x7E, 0xFE]
    made, bits = TORCH_DTYPE[dtype], torch_bits_dtype(TORCH_DTYPE[dtype])
    most = torch.finfo(made).max

    def of(*values: float) -> list[int]:
        return torch.tensor(values, dtype=torch.float64).to(made).view(bits).tolist()

    return of(float("nan"), float("inf"), float("-inf")), of(most, -most)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [n for n, d in TORCH_DTYPE.items() if d.is_floating_point])
def test_values_that_become_nonfinite_are_counted(
    dtype: str, dense: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = patterns(dtype)
    width = torch_bits_dtype(TORCH_DTYPE[dtype])
    raw = {"a": torch.ones(100, dtype=width), "w": torch.ones(100_000, dtype=width)}
    raw["w"][0] = bad[0]  # and stays so
    model = {name: bits.view(TORCH_DTYPE[dtype]) for name, bits in raw.items()}
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    if dense:
        raw["w"][1:] = 2
    places = slice(70_000, 70_000 + len(bad + good))
    raw["w"][places] = torch.tensor(bad + good).to(width)
    report = sender.sync(model.items())
    assert report.nonfinite == len(bad)
    assert engine.holds(model)
    assert len(warnings(caplog, "w: the first NaN or infinite value")) == 1
    assert "/delta_rollback" in caplog.text
    assert sender.sync(model.items()).nonfinite == 0


def test_integers_are_never_nonfinite() -> None:
    model = {"w": torch.zeros(100, dtype=torch.int16)}
    engine = Engine.of(model)
    sender = sender_of(engine, model, refuse_nonfinite=True)
    model["w"][:] = -1
    assert sender.sync(model.items()).nonfinite == 0


@pytest.mark.parametrize("full", [False, True])
def test_nonfinite_values_are_refused_if_asked(full: bool) -> None:
    model = model_of()
    engine = Engine.of(model)
    base = copied(model)
    sender = sender_of(engine, model, refuse_nonfinite=True, bucket_bytes=1)
    train(model)
    model["layers.4.weight"][1, 1] = float("inf")
    for given in (model.items(), iter(model.items())):
        with pytest.raises(ValueError, match=r"layers.4.weight: 1 values .* NaN or infinite"):
            (sender.sync_full if full else sender.sync)(given)
    assert engine.holds(base)
    assert sender.version == 0
    model["layers.4.weight"][1, 1] = 1
    sender.sync(model.items())
    assert engine.holds(model)


def masters(kind: str = "deepseek_v3") -> tuple[torch.nn.Module, Model]:
    model = make_model(kind, torch.float32)
    base = {name: tensor.bfloat16() for name, tensor in saved(model).items()}
    return model, base


def test_rounded_values_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, base = masters()
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    numel = sum(tensor.numel() for tensor in base.values())
    for step in range(2):
        change(model, step, scale=0.01)
        assert sender.sync(named_tensors(model, base)).rounded == numel
        stream = itertools.chain(checkpoint_names(model.named_parameters(), model, base))
        assert sender.sync(stream).rounded == numel
    said = [r for r in caplog.records if "are rounded to the checkpoint's dtype" in r.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]
    assert sender.sync(base.items()).rounded == 0


def test_a_few_wider_tensors_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As of routers in float32, in a model that is trained in the checkpoint's dtype."""
    model = make_model("deepseek_v3")
    base = saved(model)
    model.model.layers[1].mlp.gate.float()
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    model.get_buffer(BIAS)[:] = 0.1
    report = sender.sync(named_tensors(model, base))
    assert report.rounded == model.model.layers[1].mlp.gate.weight.numel() + 4
    [said] = warnings(caplog, "tensors")
    assert said.startswith("2 of ")
    assert "gate" in said
    assert "float32 to bfloat16" in said
    assert engine.holds({**base, BIAS: model.get_buffer(BIAS).bfloat16()})


def test_a_checkpoint_that_is_wider_gets_all_bits() -> None:
    """A few tensors of a bf16 checkpoint can be float32; they are sent so."""
    model = make_model("deepseek_v3")
    model.model.layers[1].mlp.gate.float()
    base = saved(model)
    assert base[BIAS].dtype == torch.float32
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    for _ in range(3):
        model.get_buffer(BIAS).add_(1e-3)
        report = sender.sync(named_tensors(model, base))
        assert (report.rounded, report.nnz) == (0, 4)
        assert engine.holds(saved(model))
