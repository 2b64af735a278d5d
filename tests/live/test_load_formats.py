"""What a checkpoint is certified with, where the engine reads it in a way of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scripts.live_engine import tiny_models
from tests.live.programs import python

COLLECTIVE = ["fastsafetensors", "instanttensor"]


@pytest.mark.parametrize("load_format", COLLECTIVE)
def test_vllm_reads_the_files_of_collective_formats_alone(
    load_format: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks load together, and each rank certifies when it is ready."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import default_loader

    from engine_ext.adapters.vllm.worker import checkpoint as read

    def together(*args: Any, **kwargs: Any) -> Iterable[tuple[str, torch.Tensor]]:
        raise AssertionError("a rank alone waits for the others")

    monkeypatch.setattr(default_loader, f"{load_format}_weights_iterator", together)
    folder = checkpoint("qwen3")
    config = SimpleNamespace(
        load_config=LoadConfig(load_format=load_format),
        model_config=SimpleNamespace(model=str(folder), revision=None),
    )
    assert_same(dict(read(nn.Linear(1, 1), config)), folder)


def assert_same(found: dict[str, torch.Tensor], folder: Path) -> None:
    """What was read is the checkpoint."""
    expected = tiny_models.load_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}


# SGLang's own readers, but for the one that needs a GPU.
READ_BY_SGLANG = """
import hashlib, json, sys
from types import SimpleNamespace
import torch
from torch import nn
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import get_context
from engine_ext.adapters.sglang.loading import checkpoint

def together(*args, **kwargs):
    raise AssertionError("its tensors are gone after the reading")

found = {}
for load_format in json.loads(sys.argv[2]):
    setattr(loader, f"{load_format}_weights_iterator", together)
    with get_context().override_server_args():
        extra = {"enable_gds": False} if load_format == "fastsafetensors" else {}
        config = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
        model = SimpleNamespace(
            model_path=sys.argv[1], revision=None, quantization=None, hf_config=None,
            modelopt_quant=None, _is_already_quantized=lambda: False,
        )
        runner = SimpleNamespace(load_config=config, model_config=model)
        read = checkpoint(runner, nn.Linear(1, 1))
        found[load_format] = {
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in read()
        }
print(json.dumps(found))
"""


def test_sglang_reads_the_files_of_collective_formats_alone(
    checkpoint: Callable[[str], Path],
) -> None:
    folder = checkpoint("qwen3")
    run = python("sglang", "-c", READ_BY_SGLANG, str(folder), json.dumps(COLLECTIVE))
    assert run.returncode == 0, run.stderr[-2000:]
    expected = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tiny_models.load_tensors(folder).items()
    }
    assert json.loads(run.stdout.splitlines()[-1]) == dict.fromkeys(COLLECTIVE, expected)
