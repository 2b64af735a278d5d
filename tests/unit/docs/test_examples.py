"""The Python blocks of the pages run as pasted, with what they take as given.

Those of the trainers' page, and those that need PEFT, run in tests/trainers; the one inside of Ray
in tests/verl.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import delta_sender
from delta_sender.diff.quantize import Quantizer
from engine_ext.cli import conformance
from scripts.doc_tables.__main__ import DOCS
from tests.support.cases import in_one_test
from tests.support.fake_engine import Engine, Model, error, sends
from tests.support.quantised_models import quantised, save_quantised
from tests.support.shown_examples import TEXTS, examples
from tests.support.trainer_models import change, make_model, save, saved

ROOT = DOCS.parent
URL = "http://engine:8000"
FP8 = "fp8_block"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).bfloat16()


def tensors_of(model: nn.Module) -> Model:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Cluster:
    """Engines that hold the same model, by host and port; clients reach them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: dict[str, Engine] = {}
        client = httpx.Client

        def connected(**options: Any) -> httpx.Client:
            return client(transport=httpx.MockTransport(self._answer))

        monkeypatch.setattr(httpx, "Client", connected)

    def start(self, tensors: Model, *urls: str) -> list[Engine]:
        self.engines |= {httpx.URL(url).netloc.decode(): Engine.of(tensors) for url in urls}
        return [self.engines[httpx.URL(url).netloc.decode()] for url in urls]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return self.engines[request.url.netloc.decode()].answer(request)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    """Return engines; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    return Cluster(monkeypatch)


def given(model: nn.Module, **more: Any) -> dict[str, Any]:
    """Return the names that examples take as given."""
    return {
        **{name: getattr(delta_sender, name) for name in delta_sender.__all__},
        "model": model,
        "data": [1, 2],
        "train": lambda seed: change(model, seed, 0.01),
        "checkpoint_tensors": list(tensors_of(model).items()),
        **more,
    }


# How to send ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "getting-started.md"])
def test_the_send_block_runs(page: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tensors_of(network())
    save_file(model, "model.safetensors")
    monkeypatch.setitem(os.environ, "MODEL", ".")
    [engine] = cluster.start(model, "http://localhost:8000")
    for times in (1, 2):
        exec(examples(page)["send"], {})
        assert engine.version == 3 * times
        assert engine.holds(model)
    assert not any(part.manifest.full for part in engine.log)
    assert all(part.deltas for part in engine.log)


def test_the_loop_runs(cluster: Cluster) -> None:
    model = network()
    [engine] = cluster.start(tensors_of(model), URL)
    exec(examples("sender.md")["loop"], given(model))
    assert engine.version == 2
    assert engine.holds(tensors_of(model))


@pytest.mark.parametrize("fails", [False, True])
def test_the_senders_of_a_fleet_run(
    fails: bool, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    engines = cluster.start(tensors_of(model), "http://a:8000", "http://b:30000")
    names = given(model)
    change(model, 1, 0.01)
    if fails:
        engines[1].faults = {0: sends(error(422, "NotUpdatable"))}
    exec(examples("sender.md")["fleet"], names)
    assert [engine.version for engine in engines] == [1, 0 if fails else 1]
    assert engines[0].holds(tensors_of(model))
    assert ("http://b:30000" in capsys.readouterr().out) == fails


def test_the_sender_of_quantised_weights_runs(cluster: Cluster) -> None:
    model = make_model("dense")
    save_quantised(model, FP8, Path("fp8-checkpoint"))
    [engine] = cluster.start(quantised(model, FP8), URL)
    change(model, 1, 0.01)
    exec(examples("sender.md")["quantised"], given(model))
    assert engine.version == 1
    assert engine.holds(quantised(model, FP8))


def test_the_base_of_a_resumed_trainer_is_quantised(cluster: Cluster) -> None:
    model = make_model("dense")
    wanted = quantised(model, FP8)
    names = given(model, fp8_checkpoint_tensors=wanted.items(), resumed_model=model)
    exec(examples("sender.md")["resumed"], names)
    assert names["Quantizer"] is Quantizer
    [engine] = cluster.start(dict(names["base"]), URL)
    assert engine.holds(wanted)


def test_the_sender_of_a_draft_runs(cluster: Cluster) -> None:
    target, draft = network(), network()

    def held() -> Model:
        drafts = {f"draft.{name}": tensor for name, tensor in tensors_of(draft).items()}
        return tensors_of(target) | drafts

    [engine] = cluster.start(held(), URL)
    names = given(target, target=target, draft=draft)
    exec(examples("sender.md")["draft"], names)
    assert engine.version == 1
    assert engine.holds(held())


def test_the_sender_of_a_log_runs(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Into a folder, three steps of the thousand; no engine follows it."""
    model = network()
    [engine] = cluster.start(tensors_of(model), "http://engine-0:8000")
    names = given(model, base=list(tensors_of(model).items()))
    names["model_tensors"] = lambda: model.state_dict().items()
    names["train"] = lambda model: change(model, 1, 0.01)
    text = examples("delta-log.md")["followed"]
    exec(text.replace("s3://weights/run-7", f"file://{Path.cwd()}/log").replace("1000", "3"), names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]
    assert len(list(Path("log").iterdir())) >= 3
    assert engine.version == 0


def test_the_sender_of_a_job_is_made(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    [engine] = cluster.start(tensors_of(model), URL)
    monkeypatch.setitem(os.environ, "ENGINE_URL", URL)
    monkeypatch.setitem(os.environ, "DELTA_API_KEY", "secret")
    names = given(model, os=os, base=list(tensors_of(model).items()))
    exec(examples("slurm.md")["job"], names)
    change(model, 1, 0.01)
    with names["sender"] as sender:
        sender.sync(model.state_dict().items())
    assert engine.holds(tensors_of(model))
    assert engine.requests[0].headers["authorization"] == "Bearer secret"


# How to read ---------------------------------------------------------------------------------


def test_the_versions_of_a_response_are_read() -> None:
    names: dict[str, Any] = {}
    names["response"] = {"choices": [{"weight_spans": [[0, 7], [41, 8]]}]}
    exec(examples("rollouts.md")["spans"], names)
    assert names["versions"] == {7, 8}


def test_the_receiver_of_the_suite_is_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes every sync and writes nothing, as shown, which the suite finds."""
    module = ModuleType("receiver_of_the_page")
    exec(examples("conformance.md")["receiver"], vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert conformance.main(["--only", "fused qkv", "--subject", f"{module.__name__}:make"]) == 1
    assert "mine" in capsys.readouterr().out


# Recipes for trainers that are not installed here ---------------------------------------------


class Recipe:
    """A trainer's model, the sender of a recipe, and the engine that follows."""

    def __init__(self, cluster: Cluster) -> None:
        self.model = make_model("dense")
        save(self.model, Path("checkpoint"))
        [self.engine] = cluster.start(saved(self.model), URL)
        change(self.model, 1, 0.01)

    def names(self, **more: Any) -> dict[str, Any]:
        return given(self.model, torch=torch, base="checkpoint", urls=[URL], **more)

    def sender(self) -> Any:
        return delta_sender.DeltaSender(URL, base="checkpoint")

    def check(self) -> None:
        assert self.engine.version == 1
        assert self.engine.holds(saved(self.model))


def run_openrlhf(recipe: Recipe) -> None:
    names = recipe.names(gather=lambda parameter: parameter)
    exec(examples("trainer-frameworks.md")["openrlhf"], names)
    actor = SimpleNamespace(model=SimpleNamespace(module=recipe.model))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with recipe.sender() as sender:
            names["broadcast_to_vllm"](SimpleNamespace(actor=actor, delta_sender=sender))
    finally:
        dist.destroy_process_group()


def run_nemo_rl(recipe: Recipe) -> None:
    names = recipe.names(WeightSynchronizer=object)
    names["checkpoint_tensors"] = lambda: saved(recipe.model).items()
    exec(examples("trainer-frameworks.md")["nemo_rl"], names)
    synchronizer = names["DeltaSynchronizer"]()
    synchronizer.init_communicator()
    synchronizer.sync_weights()
    assert not synchronizer.is_stale()
    synchronizer.shutdown()


def run_skyrl(recipe: Recipe) -> None:
    names = recipe.names(WeightTransferSender=object)
    exec(examples("trainer-frameworks.md")["skyrl"], names)
    sender = names["DeltaTransferSender"]()
    chunks = [SimpleNamespace(names=[n], tensors=[t]) for n, t in saved(recipe.model).items()]
    with recipe.sender() as sender.sender:
        asyncio.run(sender.send_chunks(chunks))


def run_prime_rl(recipe: Recipe) -> None:
    names = recipe.names(WeightBroadcast=object)
    exec(examples("trainer-frameworks.md")["prime_rl"], names)
    broadcast = names["DeltaBroadcast"]()
    with recipe.sender() as broadcast.sender:
        broadcast.broadcast_weights(recipe.model, 1)


@pytest.mark.parametrize("run", [run_openrlhf, run_nemo_rl, run_skyrl, run_prime_rl])
def test_a_recipe_runs(run: Callable[[Recipe], None], cluster: Cluster) -> None:
    recipe = Recipe(cluster)
    run(recipe)
    recipe.check()


def test_the_recipe_for_files_names_their_folder() -> None:
    names: dict[str, Any] = {
        "HttpRequest": lambda path, body: (path, body),
        "WeightUpdateRequests": lambda requests: requests,
        "version_folder": lambda meta: Path("/shared", str(meta)),
    }
    exec(examples("trainer-frameworks.md")["areal"], names)
    [(path, body)] = names["build_disk_weight_update_requests"](None, 7)
    assert path == "/update_weights_from_disk"
    assert body == {"model_path": "/shared/7", "load_format": "delta"}


# All of them ----------------------------------------------------------------------------------

TRAINERS = "tests/trainers/test_documentation.py"
ELSEWHERE = {
    "trainer-frameworks.md vllm": "tests/live/test_weight_transfer.py",
    "sender.md float32": "tests/live/test_trained_buffers.py",
    "sender.md adapter": TRAINERS,
    "sender.md ray": "tests/verl/test_ray.py",
}


@in_one_test("page", TEXTS)
def test_every_block_is_run(page: str) -> None:
    shown = examples(page)
    if page == "tutorial.md":  # by tests/live/test_tutorial.py, as files
        return
    assert TEXTS[page].count("```python") == len(shown)
    if page == "trainers.md":  # by `TRAINERS`, which has a list
        return
    for name in shown.keys() - {"send"}:
        where = ELSEWHERE.get(f"{page} {name}", __file__)
        assert f'examples("{page}")["{name}"]' in (ROOT / where).read_text(), name
