"""`engine_ext.conformance.installed`: syncs of a model, on an engine that is started over again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_ext.cli.plan import merge
from engine_ext.conformance import installed, sharded, toy_models
from engine_ext.conformance.installed import Judged, Report
from engine_ext.conformance.memory import memory
from engine_ext.conformance.receivers import Project
from engine_ext.conformance.sending import Refused
from engine_ext.conformance.subject import Rank
from engine_ext.conformance.syncs import Setup, Sync
from engine_ext.ranks.operations import CommitSync, Operation

pytestmark = pytest.mark.slow

Edit = Callable[[Operation[Any], Sequence[Any]], None]


class Engine:
    """Toy models that are loaded from a folder, with this project's receivers or without.

    Args:
        edit: called with each operation that the ranks have carried out, and their models.
    """

    running = 0

    def __init__(self, setup: Setup, folder: Path, syncs: bool, edit: Edit) -> None:
        weights = load_file(folder / "model.safetensors")
        self.models = [cls() for cls in setup]
        self.edit, self.project = edit, Project("scatter")
        ranks = [self._rank(model, weights) for model in self.models]
        if syncs:
            self.project.serve(ranks)
        else:
            for rank in ranks:
                rank.load()
                rank.process()
        Engine.running += 1
        assert Engine.running == 1, "two engines at a time need twice the memory"

    @staticmethod
    def _rank(model: Any, weights: dict[str, torch.Tensor]) -> Rank:
        @torch.no_grad()
        def load() -> None:
            model.load_weights((name, tensor.clone()) for name, tensor in weights.items())

        return Rank(model, weights, load, torch.no_grad()(model.after_loading))

    def call(self, request: Operation[Any]) -> Sequence[Any]:
        answers = self.project.call(request)
        with torch.no_grad():
            self.edit(request, self.models)
        return answers

    def hashes(self) -> dict[str, str]:
        return {
            f"rank {rank}: {name}": str(found)
            for rank, model in enumerate(self.models)
            for name, found in memory(model).items()
        }

    def close(self) -> None:
        Engine.running -= 1


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Report]:
    def run(
        *setup: type[toy_models.ToyModel], edit: Edit = lambda *_: None, only: Sequence[str] = ()
    ) -> Report:
        random = torch.Generator().manual_seed(0)
        weights = {
            spec.name: torch.randn(spec.shape, generator=random).to(spec.dtype)
            for spec in setup[0].specs()
        }
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        save_file(weights, model / "model.safetensors")
        before = (model / "model.safetensors").read_bytes()

        def start(folder: Path, syncs: bool) -> Engine:
            assert (folder / "config.json").exists()
            return Engine(setup, folder, syncs, edit)

        found = installed.judge_model(model, start, tmp_path / "work", merge=merge, only=only)
        assert Engine.running == 0
        assert (model / "model.safetensors").read_bytes() == before
        return found

    return run


def outcomes(report: Report) -> dict[str, str]:
    return {one.sync: one.outcome for one in report.judged}


def judged(report: Report, sync: str) -> Judged:
    [found] = [one for one in report.judged if one.sync == sync]
    return found


def test_every_kind_of_sync_is_exact(judge: Callable[..., Report]) -> None:
    report = judge(toy_models.FusedQkv)
    assert set(outcomes(report).values()) == {"exact"}
    several = [sync for sync in installed.KINDS if sync != "alone"]
    assert [one.sync for one in report.judged[:7]] == ["start with delta updates", *several]
    assert {"only q", "only k", "only v"} <= outcomes(report).keys()
    assert judged(report, "only q").tensors == 1
    assert (report.ranks, report.unsteady, report.violated) == (1, [], False)


def test_a_sync_that_changes_nothing_is_not_run(judge: Callable[..., Report]) -> None:
    odd = "zeros and NaNs in the base"
    report = judge(toy_models.FusedQkv, only=[odd])
    assert outcomes(report) == {"start with delta updates": "exact", odd: "not run"}
    assert judged(report, odd).detail == "it would change no element of these weights"
    assert (report.violated, report.is_empty) == (False, True)


def test_kinds_that_need_two_tensors_are_not_run(judge: Callable[..., Report]) -> None:
    class Alone(toy_models.ToyModel):
        shapes: ClassVar = {"w": (4, 3)}

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            self.w.data.copy_(weight)

    report = judge(Alone)
    assert {*installed.KINDS} <= outcomes(report).keys()
    for kind in ("one dense", "alone"):
        found = judged(report, kind)
        assert (found.outcome, found.detail) == (
            "not run",
            "it needs two tensors that can be updated",
        )
    assert not report.is_empty


def test_two_ranks_are_judged(judge: Callable[..., Report]) -> None:
    only = ["sparse 40 %", "to NaN"]
    report = judge(sharded.SharedHeads, sharded.SharedHeadsLast, only=only)
    assert report.ranks == 2
    assert outcomes(report) == dict.fromkeys(["start with delta updates", *only], "exact")


def test_tensors_that_the_plan_refuses_are_sent_alone(judge: Callable[..., Report]) -> None:
    class Beside(toy_models.Accumulates):
        shapes: ClassVar = {**toy_models.Accumulates.shapes, "plain": (4, 3)}

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            if name == "plain":
                self.plain.data.copy_(weight)
            else:
                super().load_one(name, weight)

    report = judge(Beside)
    refused = {row["name"] for row in report.plan if row["status"] == "uncertified"}
    assert refused
    for name in refused:
        assert judged(report, f"only {name}").outcome == "refused"
    assert judged(report, "sparse 40 %").outcome == "exact"
    assert judged(report, "sparse 40 %").tensors == len(report.plan) - len(refused)


def test_wrong_sync_names_tensors(judge: Callable[..., Report]) -> None:
    def forget(request: Operation[Any], models: Sequence[Any]) -> None:
        if isinstance(request, CommitSync):
            models[0].qkv.data[0, 0] = 7

    report = judge(toy_models.FusedQkv, edit=forget)
    found = judged(report, "dense")
    assert (found.outcome, found.detail) == ("WRONG", "rank 0: qkv")
    assert sorted(found.differs["rank 0: qkv"]) == ["k", "q", "v"]
    assert report.violated


def test_torn_sync_is_found_and_engine_started_anew(judge: Callable[..., Report]) -> None:
    def tear(request: Operation[Any], models: Sequence[Any]) -> None:
        if isinstance(request, CommitSync) and models[0].qkv.isnan().any():
            models[0].qkv.data[0, 0] = 7
            raise Refused("half of it")

    report = judge(toy_models.FusedQkv, edit=tear)
    found = judged(report, "to NaN")
    assert (found.outcome, found.detail) == ("TORN", "rank 0: qkv: half of it")
    assert outcomes(report)["only q"] == "exact"
    assert report.violated


def test_what_a_torn_sync_leaves_out_is_not_run(judge: Callable[..., Report]) -> None:
    commits = 0

    def tear(request: Operation[Any], models: Sequence[Any]) -> None:
        nonlocal commits
        commits += isinstance(request, CommitSync)
        if commits == 2 and isinstance(request, CommitSync):
            models[0].qkv.data[0, 0] = 7
            raise Refused("half of it")

    report = judge(toy_models.FusedQkv, edit=tear, only=["alone"])
    torn, *others, first = [one.sync for one in report.judged[1:]]
    assert judged(report, torn).outcome == "TORN"
    assert judged(report, first).detail == "not compared: a sync after it was torn"
    assert others
    assert {judged(report, one).detail for one in others} == {f"{torn} was torn before it"}


def test_tensors_that_no_checkpoint_decides_are_not_judged(
    judge: Callable[..., Report],
) -> None:
    class Workspace(toy_models.FusedQkv):
        shapes: ClassVar = toy_models.FusedQkv.shapes
        made = 0

        def build(self) -> None:
            super().build()
            Workspace.made += 1
            self.register_buffer("workspace", torch.tensor([float(Workspace.made)]))

    report = judge(Workspace)
    assert report.unsteady == ["rank 0: workspace"]
    assert set(outcomes(report).values()) == {"exact"}


def test_receiver_that_changes_the_start_is_wrong(
    judge: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Project.serve

    def serve(self: Project, ranks: Sequence[Rank]) -> None:
        original(self, ranks)
        vars(ranks[0].model)["extra"] = torch.ones(1)

    monkeypatch.setattr(Project, "serve", serve)
    report = judge(toy_models.FusedQkv)
    assert judged(report, "start with delta updates").outcome == "WRONG"
    assert judged(report, "start with delta updates").detail == "rank 0: extra"


def test_one_tensor_of_each_kind_is_sent_alone() -> None:
    names = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in ("q", "k")]
    plan = [{"name": name, "status": "exact", "tied_to": ""} for name in [*names, "lm_head.weight"]]
    plan[0]["status"] = "uncertified"
    plan[-1]["tied_to"] = names[1]
    weights = {row["name"]: torch.ones(2) for row in plan}
    weights["model.layers.0.g_idx"] = torch.ones(2, dtype=torch.int32)
    plan.append({"name": "model.layers.0.g_idx", "status": "exact", "tied_to": ""})
    *several, alone = installed.batches(plan, weights)
    assert [sync.name for sync in alone] == [
        "only model.layers.0.k.weight",
        "only model.layers.1.q.weight",
        "only model.layers.0.q.weight",
    ]
    assert all(names[0] not in sync.tensors for [sync] in several)
    assert all("model.layers.0.g_idx" not in sync.tensors for [sync] in several)


def test_tied_tensors_stay_equal() -> None:
    weights = {"embed": torch.ones(4), "head": torch.ones(4), "norm": torch.ones(4)}
    plan = [{"name": "head", "tied_to": "embed"}]
    target = installed.changed(weights, Sync("all", "sparse", ("embed", "head")), plan)
    assert torch.equal(target["embed"], target["head"])
    assert not torch.equal(target["embed"], weights["embed"])
    assert target["norm"] is weights["norm"]
