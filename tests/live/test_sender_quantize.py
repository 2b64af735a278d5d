"""A sender that quantises a bf16 trainer's weights, against vLLM.

Its fp8 blocks are those that vLLM's own function makes on the CPU. After several syncs an engine is
one that was started on a checkpoint which compressed-tensors has made of the trainer's weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from delta_sender import DeltaSender, quantize_weight
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.quantised_checkpoints import by_compressed_tensors, quantised, rewrite
from tests.live.conftest import fingerprint
from tests.support.fake_engine import bits
from tests.support.plain_trainer import Trainer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 1), (384, 129)])
def test_blocks_equal_vllm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)
    weight[:, 128:] = 0  # whole blocks of some
    found = quantize_weight(weight, "fp8_block")
    for tensor, expected in zip(found.values(), per_block_cast_to_fp8(weight), strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert (bits(tensor) == bits(expected)).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "checkpoint_format", "kind"),
    [("fp8_channel", "fp8_channel", "float"), ("int8_channel", "w8a8", "int")],
)
def test_an_engine_follows_a_bf16_trainer(
    form: str,
    checkpoint_format: str,
    kind: str,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    model = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(model))

    def quantised_by_library(name: str) -> Path:
        folder = shutil.copytree(model, tmp_path / name)
        tensors = quantised(trainer.tensors, partial(by_compressed_tensors, kind=kind))
        return rewrite(checkpoint_format, folder, tensors)

    base = quantised_by_library("base")
    engine = start("vllm", base)
    seen = [fingerprint(engine)]
    stored = tiny_models.load_tensors(base)
    with DeltaSender(engine.url, base=stored.items(), quantize=form) as sender:
        for _ in range(3):
            trainer.step()
            report = sender.sync(trainer.tensors.items())
            assert (report.status, report.full) == ("committed", False)
            seen.append(fingerprint(engine))
    assert seen[0] != seen[1] != seen[2] != seen[3]
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    engine.stop()
    assert fingerprint(start("vllm", quantised_by_library("target"))) == seen[3]
