"""Quantised weights are bit for bit what others make of them, and syncs send exactly these."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from delta_sender import DeltaSender, Quantizer, SyncError, cli, quantize_weight
from delta_sender.diff.quantize import FORMS
from engine_ext.format import ENCODINGS
from scripts.live_engine.quantised_checkpoints import by_compressed_tensors
from tests.support.fake_engine import Engine, Model, bits, error, sends, snapshot_is

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FLOATS = (BF16, torch.float16, torch.float32)
CHANNEL = {"fp8_channel": "float", "int8_channel": "int"}
# Zeros of both signs, the least and greatest numbers, and halves between quantised values.
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 1e-7, 2.0**-14, -(2.0**-9), 0.5, -63.75, 447.0, 6e4, -6e4]
E4M3 = torch.arange(127, dtype=torch.uint8).view(FP8).float().tolist()  # codes 0 ... 126: 448


@st.composite
def weights(draw: Callable[..., Any], dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """Draw a matrix of normal numbers and special ones, some rows all zero."""
    rows, columns = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(rows, columns, generator=generator) * draw(
        st.sampled_from([1e-6, 0.02, 9])
    )
    special = torch.tensor(draw(st.lists(st.sampled_from(SPECIAL), max_size=8)))
    places = torch.randint(0, weight.numel(), special.shape, generator=generator)
    weight.view(-1)[places] = special
    weight[: draw(st.integers(0, rows))][::2] *= 0
    return weight.to(draw(st.sampled_from(dtypes)))


def by_loops(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Quantise 128x128 blocks by a table of e4m3; return fp8 patterns and float32 scales."""
    given = weight.float().numpy()
    rows, columns = given.shape
    stored = np.zeros(given.shape, np.uint8)
    scales = np.zeros((math.ceil(rows / 128), math.ceil(columns / 128)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        largest = max(np.float32(1e-4), np.abs(given[at]).max())
        scales[i, j] = largest / np.float32(448)
        scaled = given[at] * (np.float32(1) / scales[i, j])
        stored[at] = nearest_e4m3(scaled)
    return stored, scales


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """Return the patterns of the nearest e4m3 numbers; of two, the even one."""
    given, known = np.abs(values).astype(np.float64), np.array(E4M3)
    above = np.searchsorted(known, given).clip(1, len(known) - 1)
    below = above - 1
    farther = given - known[below], known[above] - given
    is_above = (farther[1] < farther[0]) | ((farther[1] == farther[0]) & (above % 2 == 0))
    return np.where(is_above, above, below) + 128 * np.signbit(values)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and np.array_equal(bits(one), bits(other))


@pytest.mark.slow
@pytest.mark.parametrize("form", CHANNEL)
@settings(max_examples=60, deadline=None)
@given(weight=weights())
@example(weight=torch.zeros(3, 5, dtype=BF16))
@example(weight=torch.tensor([[-0.0, 1.0, -1e-30], [-0.0, -0.0, -0.0]], dtype=BF16))
@example(weight=torch.arange(-32768, 32768).short().view(BF16).nan_to_num(0, 0, 0).view(256, 256))
def test_channels_equal_compressed_tensors(form: str, weight: torch.Tensor) -> None:
    found = quantize_weight(weight, form)
    stored = by_compressed_tensors(weight, CHANNEL[form])
    assert stored.keys() == {"weight", "weight_scale"}
    assert same(found[""], stored["weight"])
    assert same(found["_scale"], stored["weight_scale"])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(weight=weights())
@example(weight=torch.zeros(3, 5, dtype=BF16))
@example(weight=torch.full((129, 257), -3e38, dtype=BF16))
def test_blocks_equal_plain_loops(weight: torch.Tensor) -> None:
    found = quantize_weight(weight, "fp8_block")
    stored, scales = by_loops(weight)
    assert found[""].dtype == FP8
    assert np.array_equal(bits(found[""]), stored.ravel())
    assert same(found["_scale_inv"], torch.from_numpy(scales))


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_are_near_the_weights(form: str) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    quantized, scale = quantize_weight(weight, form).values()
    if form == "fp8_block":  # as DeepSeek's weight_dequant reads it
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    step = scale / 2 if form == "int8_channel" else weight.abs() / 16 + scale / 1024
    assert ((quantized.float() * scale - weight).abs() <= 1.02 * step).all()


@pytest.mark.parametrize("form", FORMS)
def test_stacked_experts_are_quantised_alone(form: str) -> None:
    experts = torch.randn(2, 3, 130, 40).to(BF16)
    found = quantize_weight(experts, form)
    for at in np.ndindex(2, 3):
        alone = quantize_weight(experts[at], form)
        assert all(same(found[suffix][at], alone[suffix]) for suffix in alone)


@pytest.mark.parametrize("form", FORMS)
def test_large_weights_are_quantised_in_chunks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(700, 200, generator=torch.Generator().manual_seed(2)).to(BF16)
    whole = quantize_weight(weight, form)
    for chunk in (1, 60_000):  # 128 rows; 256 rows
        monkeypatch.setattr("delta_sender.diff.quantize._CHUNK", chunk)
        chunked = quantize_weight(weight, form)
        assert all(same(chunked[suffix], whole[suffix]) for suffix in whole)


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_quantised_is_refused(form: str) -> None:
    """Whatever is not finite, in each dtype; and vectors."""
    for value, dtype in product([math.nan, math.inf, -math.inf], FLOATS):
        weight = torch.zeros(2, 150, 140, dtype=dtype)
        weight[1, 149, 3] = value
        with pytest.raises(ValueError, match="NaN and infinity"):
            quantize_weight(weight, form)
    with pytest.raises(ValueError, match=r"matrices, not shape \(7,\)"):
        quantize_weight(torch.ones(7), form)


def trained() -> Model:
    """Return a trainer's model in bf16; the norm stays as it is."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"q.weight": (200, 300), "experts.up": (2, 130, 40), "norm.weight": (300,)}
    return {n: torch.randn(s, generator=generator).to(BF16) for n, s in shapes.items()}


def checkpoint_of(model: Model, form: str) -> Model:
    """Return the tensors of the model's quantised checkpoint."""
    found: Model = {}
    for name, tensor in model.items():
        parts = quantize_weight(tensor, form) if tensor.ndim > 1 else {"": tensor.clone()}
        found |= {name + suffix: part for suffix, part in parts.items()}
    return found


def sender_of(engine: Engine, base: Model, form: str, **options: Any) -> DeltaSender:
    return DeltaSender("http://e", base.items(), client=engine.client(), quantize=form, **options)


@pytest.mark.parametrize(
    ("form", "encoding"),
    [*zip(cycle(FORMS), ENCODINGS, strict=False), *((f, "auto") for f in FORMS)],
)
def test_an_engine_follows_a_bf16_trainer(form: str, encoding: str) -> None:
    model = trained()
    base = checkpoint_of(model, form)
    engine = Engine.of(base)
    sender = sender_of(engine, base, form, encoding=encoding, bucket_bytes=1 << 14)
    report = sender.sync(model.items())
    assert report.nnz == 0  # the base is the model's
    for step in range(2):
        for tensor in model.values():
            chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(step)) < 0.02
            tensor[chosen] *= 1 + 2**-6
        report = sender.sync(iter(model.items()))
        assert engine.holds(checkpoint_of(model, form))
        assert snapshot_is(sender, engine)
        assert not report.full
        assert 0 < report.nnz < report.numel / 4
    assert sender.sync_full(model.items()).full
    engine.version = 99  # it has restarted
    engine.weights = {name: bits(tensor) for name, tensor in base.items()}
    assert sender.sync(model.items()).full
    assert engine.holds(checkpoint_of(model, form))


@pytest.mark.parametrize(
    ("form", "rows", "columns"), [("fp8_channel", 1, 300), ("fp8_block", 72, 128)]
)
def test_a_weight_that_moves_a_scale_sends_its_row_or_block(
    form: str, rows: int, columns: int
) -> None:
    model = {"q.weight": trained()["q.weight"], "norm.weight": trained()["norm.weight"]}
    base = checkpoint_of(model, form)
    engine = Engine.of(base)
    sender = sender_of(engine, base, form)
    model["q.weight"][150, 200] = 100.0
    report = sender.sync(model.items())
    new = checkpoint_of(model, form)
    assert engine.holds(new)
    changed = {d.name: d for part in engine.log for d in part.deltas if d.nnz}
    suffix = FORMS[form].scale_suffix
    assert changed.keys() == {"q.weight", f"q.weight{suffix}"}
    scales = changed[f"q.weight{suffix}"]
    assert scales.indices is not None
    assert scales.nnz == 1
    moved = (base["q.weight"].view(torch.uint8) != new["q.weight"].view(torch.uint8)).nonzero()
    assert report.nnz == len(moved) + 1
    first, last = moved.amin(0).tolist(), moved.amax(0).tolist()
    start = [150, 0] if form == "fp8_channel" else [128, 128]
    assert all(s <= f for s, f in zip(start, first, strict=True))
    assert all(e < s + n for s, e, n in zip(start, last, (rows, columns), strict=True))
    assert len(moved) > 0.9 * rows * columns


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_that_moves_no_scale_sends_itself_or_nothing(form: str) -> None:
    model = {"q.weight": trained()["q.weight"]}
    engine = Engine.of(checkpoint_of(model, form))
    sender = sender_of(engine, checkpoint_of(model, form), form)
    small = int(model["q.weight"][7].abs().argmin())
    model["q.weight"][7, small] = 0.2
    assert sender.sync(model.items()).nnz == 1
    model["q.weight"][7, small] *= 1 + 2**-7
    assert sender.sync(model.items()).nnz == 0
    assert engine.holds(checkpoint_of(model, form))


@pytest.mark.parametrize("form", FORMS)
def test_nan_or_a_refusal_commits_nothing(form: str) -> None:
    model = trained()
    base = checkpoint_of(model, form)
    engine = Engine.of(base)
    sender = sender_of(engine, base, form, bucket_bytes=1)
    model["q.weight"][0, 0] = 50.0
    model["experts.up"][1, 2, 3] = math.nan
    with pytest.raises(ValueError, match=r"experts.up: NaN and infinity"):
        sender.sync(model.items())
    model["experts.up"][1, 2, 3] = 0
    engine.faults = {len(engine.requests): sends(error(507, "SpoolFull"))}
    with pytest.raises(SyncError):
        sender.sync(model.items())
    assert engine.version == sender.version == 0
    assert engine.holds(base)
    sender.sync(model.items())
    assert engine.holds(checkpoint_of(model, form))


@pytest.mark.parametrize("form", CHANNEL)
def test_the_trainer_s_own_precision_is_quantised(form: str) -> None:
    for trainer, stored in product(FLOATS, FLOATS):
        weight = (trained()["q.weight"].float() * 1.001).to(trainer)
        weight[5] = 0
        quantizer = Quantizer(form, {"q.weight": FORMS[form].dtype, "q.weight_scale": stored})
        found = dict(quantizer([("q.weight", weight.clone().requires_grad_())]))
        wide = torch.promote_types(trainer, stored)
        expected = by_compressed_tensors(weight.to(wide), CHANNEL[form], stored)
        assert same(found["q.weight"], expected["weight"]), (trainer, stored)
        assert same(found["q.weight_scale"], expected["weight_scale"]), (trainer, stored)


def test_float32_masters_differ_from_what_is_rounded_first() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    for form in FORMS:
        exact, rounded = (quantize_weight(w, form, BF16) for w in (weight, weight.to(BF16)))
        assert not same(exact[""], rounded[""])


def test_what_is_quantised_already_is_passed_on() -> None:
    base = checkpoint_of(trained(), "fp8_block")
    dtypes = {name: tensor.dtype for name, tensor in base.items()}
    assert list(Quantizer("fp8_block", dtypes)(base.items())) == list(base.items())


@pytest.mark.parametrize(
    ("form", "base", "said"),
    [
        ("fp4", {}, "'fp4' is not one of fp8_block, fp8_channel, int8_channel"),
        ("fp8_block", trained(), r"no weight in the form fp8_block, with NAME_scale_inv"),
        ("int8_channel", checkpoint_of(trained(), "fp8_channel"), "no weight in the form"),
        ("fp8_channel", checkpoint_of(trained(), "fp8_block"), "no weight in the form"),
    ],
)
def test_a_base_in_another_form_is_refused(form: str, base: Model, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DeltaSender("http://e", base.items(), client=httpx.Client(), quantize=form)


def test_scales_of_another_shape_are_refused() -> None:
    base = checkpoint_of(trained(), "fp8_block")
    base["q.weight_scale_inv"] = torch.ones(4, 5)  # blocks of 64
    engine = Engine.of(base)
    sender = sender_of(engine, base, "fp8_block")
    with pytest.raises(ValueError, match=r"q.weight_scale_inv: float32 \(2, 3\), but .* \(4, 5\)"):
        sender.sync(trained().items())
    assert engine.holds(base)


def test_the_command_quantises_its_target(tmp_path: Path) -> None:
    model = trained()
    base = checkpoint_of(model, "fp8_block")
    model["q.weight"][3, 3] = 50.0
    new = checkpoint_of(model, "fp8_block")
    arguments = ["--quantize", "fp8_block"]
    for flag, tensors in (("base", base), ("target", model)):
        (tmp_path / flag).mkdir()
        save_file(tensors, tmp_path / flag / "model.safetensors")
        arguments += [f"--{flag}", str(tmp_path / flag)]
    for kind in ([], ["--full"]):
        log = tmp_path / f"log{len(kind)}"
        assert cli.main([*arguments, *kind, "--save", str(log)]) == 0
        engine = Engine.of(base)
        for file in sorted(log.glob("*/*.safetensors")):
            answer = engine.take(httpx.Request("POST", "http://e", content=file.read_bytes()))
            assert answer.status_code == 200
        assert engine.holds(new)


def test_the_command_needs_the_quantised_base(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "t", "--full", "--quantize", "fp8_block", "--dry-run"]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "--base is needed" in capsys.readouterr().err
