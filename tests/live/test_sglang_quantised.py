"""Quantised weights on SGLang: what its own processing makes of them follows every sync.

On a CPU, SGLang loads most of them only if that has AMX. A plugin stands in for its kernels
(``tests/shims/sglang_amx``); what quantises is SGLang's. Nothing can be generated then, so all that
hangs on the model is compared with a model that was freshly loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_sender import DeltaSender
from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from tests.live.sglang_memory import Server
from tests.support.in_process_sglang import Case, run

AMX = Path(__file__).parents[1] / "shims" / "sglang_amx"
# How many tensors have which status in the plan.
STATES = {
    "unquantised": {"exact": 25},
    "online-fp8": {"rebuilt": 14, "exact": 11},
    "online-fp8-inference-mode": {"rebuilt": 14, "exact": 11},
    "online-fp8-experts": {"rebuilt": 32, "exact": 13},
    "fp8-tensor": {"rebuilt": 28, "exact": 11},
    "fp8-block": {"exact": 39},
    "fp8-channel": {"exact": 25, "cast": 14},
    "w8a8": {"exact": 25, "cast": 14},
    "w8a8-int8": {"rebuilt": 28, "exact": 11},
    "fp8-tensor-static": {"rebuilt": 42, "exact": 11},
    "compressed-fp8-tensor": {"rebuilt": 28, "exact": 11},
    "compressed-fp8-tensor-static": {"rebuilt": 42, "exact": 11},
    "w8a8-tensor": {"rebuilt": 28, "exact": 11},
    "w8a8-asymmetric": {"rebuilt": 14, "cast": 14, "exact": 11},
    "awq": {"rebuilt": 42, "exact": 11},
    # Layers that load several tensors as one load the order of groups of all into one place, so
    # that it is refused, and with it a full sync.
    "gptq": {"rebuilt": 46, "exact": 11, "uncertified": 10},
    "dummy": {"exact": 25},
    "dummy-online-fp8": {"rebuilt": 14, "exact": 11},
    "dummy-online-fp8-experts": {"rebuilt": 32, "exact": 13},
    "dummy-fp8-block": {"exact": 39},
    "dummy-fp8-tensor": {"rebuilt": 28, "exact": 11},
    "dummy-w8a8": {"exact": 25, "cast": 14},
    "dummy-awq": {"rebuilt": 42, "exact": 11},
}
METHODS = {
    "online-fp8": "Fp8LinearMethod",
    "online-fp8-experts": "Fp8MoEMethod",
    "fp8-tensor": "Fp8LinearMethod",
    "fp8-block": "Fp8LinearMethod",
    "fp8-channel": "CompressedTensorsLinearMethod",
    "w8a8": "CompressedTensorsLinearMethod",
    "w8a8-int8": "W8A8Int8LinearMethod",
    "awq": "AWQLinearMethod",
    "gptq": "GPTQLinearMethod",
}
# Checkpoints that SGLang itself cannot load.
ERRORS = {
    "w4a16": "AssertionError: Torch not compiled with CUDA enabled",
    # It makes one scale for a layer that joins several tensors, and loads several into it.
    "w8a8-static": "IndexError: index 1 is out of bounds for dimension 0 with size 1",
    "w8a8-static-asymmetric": "IndexError: index 1 is out of bounds for dimension 0 with size 1",
}
KINDS = {"unquantised": "qwen3", "dummy": "qwen3", "online-fp8-experts": "qwen3_moe"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The observations of every case; see `tests.support.in_process_sglang`."""
    root = tmp_path_factory.mktemp("sglang")
    cases = [case(name, root) for name in (*STATES, *ERRORS)]
    return run(SglangProcess.interpreter(), Path(cases[0].folders[0]), cases, root)


def case(name: str, root: Path) -> Case:
    """A case of `STATES`; those of dummy weights are like the others, but how they begin."""
    of = name.removeprefix("dummy-")
    online = of.startswith("online")
    form = KINDS.get(of, "qwen3" if online else of.replace("-", "_"))
    return Case(
        name,
        checkpoints(form, root / name),
        quantization="fp8" if online else None,
        dtype=quantised_checkpoints.serving_dtype(form),
        load_format="dummy" if name.startswith("dummy") else "auto",
        inference=name.endswith("inference-mode"),
    )


def checkpoints(kind: str, folder: Path) -> list[str]:
    """A checkpoint of a format or an architecture, and two later versions of it."""
    if kind in quantised_checkpoints.FORMATS:
        base = quantised_checkpoints.build(kind, folder / "0")
    else:
        base = tiny_models.build(kind, folder / "0")
    folders, tensors = [base], tiny_models.load_tensors(base)
    for number in (1, 2):
        tensors = quantised_checkpoints.step(tensors, number)
        folders.append(tiny_models.save_checkpoint(base, folder / str(number), tensors))
    return list(map(str, folders))


@pytest.mark.parametrize("name", STATES)
def test_every_weight_follows(name: str, found: dict[str, Any]) -> None:
    """Two syncs, a rollback and a full sync; also what is no tensor is as in a fresh model."""
    facts = found[name]
    assert facts.get("states") == STATES[name], facts
    assert METHODS.get(name.removeprefix("dummy-")) in (None, *facts["methods"])
    assert facts["moved"]
    for what in ("wrong", "not rolled back", "corrupted"):
        assert facts[what] == [], what
    assert all(tensor.endswith(".g_idx") for tensor in facts["reasons"]), facts["reasons"]
    if "uncertified" in STATES[name]:
        [reason] = facts["not sent again"]
        assert reason.startswith("a full sync must cover every tensor; 10 are missing")
    else:
        assert facts["not sent again"] == []


@pytest.mark.parametrize("name", ERRORS)
def test_what_sglang_cannot_load(name: str, found: dict[str, Any]) -> None:
    """Should it some day, it is to be compared like the others."""
    assert found[name]["error"] == ERRORS[name]


def test_the_loader_is_given_the_names_that_sglang_gives_it(found: dict[str, Any]) -> None:
    assert found["names in mxfp8"] == ["up.weight", "up.weight_scale_inv"]


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2])
def test_two_ranks_rebuild_in_their_schedulers(
    stages: int, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """A rebuild that fails on one rank leaves both as they are, and SGLang serving."""
    seen = tmp_path / "seen"
    seen.mkdir()
    folders = list(map(Path, checkpoints("qwen3", tmp_path / "qwen3")))
    steps = [tiny_models.load_tensors(folder) for folder in folders]

    def serve(folder: Path) -> Server:
        flags = ["--quantization", "fp8"]
        return Server(start, folder, 2 // stages, seen, flags, [AMX], stages=stages)

    server = serve(folders[0])
    for plan in server.engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        states = [row["status"] for row in plan]
        counted = {state: states.count(state) for state in states}
        if stages == 1:
            assert counted == STATES["online-fp8"]
        else:
            assert counted.keys() == {*STATES["online-fp8"], "not on this rank"}
    found = [server.memory()]
    with DeltaSender(server.engine.url, base=steps[0].items()) as sender:
        (seen / "fail_rebuild-1").touch()
        with pytest.raises(Exception, match="the memory went away"):
            sender.sync(steps[1].items())
        assert server.memory() == found[0]
        for tensors in steps[1:]:
            report = sender.sync(tensors.items())
            assert (report.status, report.full) == ("committed", False)
            assert "rebuild_ms" in report.engine["timings_ms"]
            found.append(server.memory())
    for rank in range(2):
        assert found[0][1][rank] != found[1][1][rank] != found[2][1][rank]
    assert server.engine.post("/delta_rollback", json={}).json()["status"] == "rolled_back"
    assert server.memory() == found[1]
    with DeltaSender(server.engine.url, base=steps[0].items(), full="allow") as sender:
        report = sender.sync(steps[2].items())
    assert (report.status, report.full) == ("committed", True)
    assert server.memory() == found[2]
    scan = server.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []
    server.engine.stop()
    fresh = serve(folders[2])
    assert fresh.memory() == found[2]
    fresh.engine.stop()
