"""Certification with the checkpoint as read, where the engine reads it in a way of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine_ext.conformance.toy_models import UNTOUCHED, ToyModel
from engine_ext.files import read_checkpoint
from engine_ext.ranks import SingleRank
from engine_ext.settings import Settings
from engine_ext.startup import LoadedModel
from engine_ext.sync import make_receiver
from scripts.live_engine import tiny_models
from tests.live.programs import python
from tests.support.plain_trainer import model_digest
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import base_checkpoint, delta_between, load, memory, one_part

COLLECTIVE = ["fastsafetensors", "instanttensor"]


@pytest.mark.parametrize("load_format", COLLECTIVE)
def test_vllm_reads_the_files_of_collective_formats_alone(
    load_format: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks load together, and each rank certifies when it is ready."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import default_loader

    from engine_ext.adapters.vllm.checkpoint import checkpoint as read

    def together(*args: Any, **kwargs: Any) -> Iterable[tuple[str, torch.Tensor]]:
        raise AssertionError("a rank alone waits for the others")

    monkeypatch.setattr(default_loader, f"{load_format}_weights_iterator", together)
    folder = checkpoint("qwen3")
    config = SimpleNamespace(
        load_config=LoadConfig(load_format=load_format),
        model_config=SimpleNamespace(model=str(folder), revision=None),
    )
    assert_same(dict(read(nn.Linear(1, 1), config)), folder)


class Pair(ToyModel):
    shapes: ClassVar = {"a": (4, 8), "b": (8,), "c": (8,)}


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize(
    "load_format", ["auto", "mistral", "hf", "safetensors", "fastsafetensors", "instanttensor"]
)
def test_vllm_certifies_the_files_that_it_has_loaded(
    load_format: str, is_indexed: bool, tmp_path: Path
) -> None:
    """The folder has other values under the same names in Mistral's file."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from engine_ext.adapters.vllm.checkpoint import checkpoint as read

    model = base_checkpoint(Pair)
    consolidated = {**base_checkpoint(Pair, seed=9), "c": model["c"]}
    save_file(model, tmp_path / "model.safetensors")
    save_file(consolidated, tmp_path / "consolidated.safetensors")
    if is_indexed:
        index = {"weight_map": dict.fromkeys(model, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_config = LoadConfig(load_format=load_format)
    config = SimpleNamespace(
        load_config=load_config,
        model_config=SimpleNamespace(model=str(tmp_path), revision=None),
    )
    loader: Any = get_model_loader(load_config)
    files = sorted(loader._prepare_weights(str(tmp_path), None, None, True, None)[1])
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    live = load(Pair, loaded)
    before = memory(live)
    receiver = make_receiver(
        LoadedModel(
            model=live,
            load_weights=live.load_weights,
            checkpoint=lambda: read(nn.Linear(1, 1), config),
            reload=live.load_weights,
            ranks=SingleRank(),
            constants=lambda path, tensor: path == UNTOUCHED,
        ),
        Settings(),
    )
    engine = Engine([], tmp_path)
    engine.receivers = [receiver]
    [status] = engine.status()
    base = dict(read_checkpoint(tmp_path))
    assert base.keys() == model.keys()
    assert all(torch.equal(base[name], model[name]) for name in base)
    body = one_part(
        [delta_between("a", base["a"], base["a"] + 1)], digest_before=model_digest(base).hex()
    )
    if load_format not in ("auto", "mistral") and not is_indexed:
        assert len(files) == 2
        assert status["uncertified"].keys() == {"a", "b"}
        assert "several of the files that the engine reads" in status["uncertified"]["a"]
        [error] = errors_of(engine.stage(part_id(body), body))
        assert (error["type"], error["tensor"]) == ("NotUpdatable", "a")
    elif load_format not in ("auto", "mistral"):
        assert status["digest"] == model_digest(model).hex()
        errors_of(engine.apply(part_id(body), body), none=True)
        assert live.a.equal(model["a"] + 1)
        return
    else:
        assert status["digest"] == model_digest(consolidated).hex()
        [error] = errors_of(engine.stage(part_id(body), body))
        assert error["type"] == "BaseMismatch"
    assert memory(live) == before


def assert_same(found: dict[str, torch.Tensor], folder: Path) -> None:
    """Check that the read tensors are the checkpoint's."""
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
from engine_ext.adapters.sglang.checkpoint import checkpoint

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
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
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
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in tiny_models.load_tensors(folder).items()
    }
    assert json.loads(run.stdout.splitlines()[-1]) == dict.fromkeys(COLLECTIVE, expected)
