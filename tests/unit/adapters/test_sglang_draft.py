"""The draft model of SGLang's speculative decoding, with stand-ins for SGLang."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.refusals import Refusal
from engine_ext.adapters.sglang import draft, refusals
from engine_ext.adapters.target_and_draft import ModelRole
from engine_ext.ranks import replicas
from engine_ext.startup import LoadingTrace, UnprocessedModules


class Scheduler:
    """SGLang's scheduler."""

    def __init__(self, draft_worker: Any = None) -> None:
        self.draft_worker = draft_worker
        self.pools = 0

    def init_memory_pools(self) -> None:
        self.pools += 1


class EAGLEWorkerV2:
    """SGLang's worker of an EAGLE head."""

    def __init__(self, *runners: Any, hot_token_id: Any = None) -> None:
        self._runners = runners
        self.draft_worker = SimpleNamespace(hot_token_id=hot_token_id)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("draft", runner) for runner in self._runners]


class StandaloneWorkerV2(EAGLEWorkerV2):
    """SGLang's worker of a draft model."""


class OtherWorker(EAGLEWorkerV2):
    """A platform's replacement for it."""


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for SGLang's modules."""
    parallel = SimpleNamespace(pp_size=1)
    modules = {
        "runtime_context": SimpleNamespace(get_parallel=lambda: parallel),
        "managers.scheduler": SimpleNamespace(Scheduler=Scheduler),
        "speculative.eagle_worker_v2": SimpleNamespace(EAGLEWorkerV2=EAGLEWorkerV2),
        "speculative.standalone_worker_v2": SimpleNamespace(StandaloneWorkerV2=StandaloneWorkerV2),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    monkeypatch.setattr(Scheduler, "init_memory_pools", Scheduler.init_memory_pools)
    monkeypatch.setattr(draft, "_expected", [])
    monkeypatch.setattr(draft, "checkpoint", lambda runner, model: runner.reads)
    monkeypatch.setattr(draft, "observer_of", Observed)
    return parallel


class Observed:
    """A runner that loads its model."""

    def __init__(self, role: ModelRole, runner: Any, loading: Any, states: Any) -> None:
        self.role, self.engine = role, SimpleNamespace(runner=runner)

    def __enter__(self) -> None:
        self.engine.runner.observed = True

    def __exit__(self, *error: object) -> None:
        self.engine.runner.observed = False


def algorithm(name: str) -> Any:
    return SimpleNamespace(
        name=name, is_none=lambda: name == "NONE", is_ngram=lambda: name == "NGRAM"
    )


def runner(path: str, **fields: Any) -> Any:
    model = {"model_path": path, "revision": None, "dtype": torch.bfloat16, **fields}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model), model=nn.Linear(2, 2), reads=iter, observed=False
    )


def load_both(
    draft_runner: Any,
    make_worker: Callable[..., Any] = EAGLEWorkerV2,
    share: Callable[[Any, Any], None] = lambda target, draft: None,
    **fields: Any,
) -> list[Any]:
    """Load a target and its draft model as SGLang does; return what the receiver is made of.

    Args:
        share: gives the draft model the target's tensors.
        fields: of the worker.
    """
    target = Observed(ModelRole("target", "", True), runner("target"), None, None)
    made: list[Any] = []
    draft.expect(target, LoadingTrace(), UnprocessedModules(0), made.extend)  # type: ignore[arg-type]
    seen: list[bool] = []
    draft.load(draft_runner, lambda: seen.append(draft_runner.observed))
    assert (seen, draft_runner.observed) == ([True], False)
    assert made == []
    share(target.engine.runner.model, draft_runner.model)
    scheduler = Scheduler(make_worker(draft_runner, **fields))
    scheduler.init_memory_pools()
    assert scheduler.pools == 1
    return made


@pytest.mark.parametrize("name", ["NONE", "NGRAM"])
def test_without_draft_weights_the_model_is_alone(name: str, sglang: SimpleNamespace) -> None:
    assert draft.target_role(SimpleNamespace(spec_algorithm=algorithm(name))) == ModelRole(
        "", "", True
    )


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_with_a_draft_model_the_target_has_its_place(name: str, sglang: SimpleNamespace) -> None:
    target = SimpleNamespace(spec_algorithm=algorithm(name))
    assert draft.target_role(target) == ModelRole("target", "", True)


@pytest.mark.parametrize(
    ("name", "stages", "copies", "refusal"),
    [
        ("DFLASH", 1, 1, refusals.DRAFT_MODEL),
        ("FROZEN_KV_MTP", 1, 1, refusals.DRAFT_MODEL),
        ("a plugin's", 1, 1, refusals.DRAFT_MODEL),
        ("EAGLE", 2, 1, refusals.DRAFT_WITH_STAGES),
        ("EAGLE", 1, 2, refusals.DRAFT_WITH_REPLICAS),
    ],
)
def test_what_is_not_known_to_be_reached_is_refused(
    name: str,
    stages: int,
    copies: int,
    refusal: Refusal,
    sglang: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sglang.pp_size = stages
    monkeypatch.setattr(replicas, "count", lambda: copies)
    with pytest.raises(RuntimeError, match=re.escape(refusal.message)):
        draft.target_role(SimpleNamespace(spec_algorithm=algorithm(name)))


@pytest.mark.parametrize("worker", [EAGLEWorkerV2, StandaloneWorkerV2])
def test_the_receiver_is_made_once_the_models_share(
    worker: type[Any], sglang: SimpleNamespace
) -> None:
    """A checkpoint of its own has a prefix."""
    made = load_both(runner("draft"), worker)
    assert [one.role for one in made] == [
        ModelRole("target", "", True),
        ModelRole("draft", "draft.", True),
    ]
    Scheduler().init_memory_pools()
    assert len(made) == 2


def test_the_targets_checkpoint_is_read_once(sglang: SimpleNamespace) -> None:
    assert load_both(runner("target"))[1].role == ModelRole("draft", "", False)
    assert load_both(runner("target", revision="main"))[1].role == ModelRole("draft", "", False)
    assert load_both(runner("target", revision="r"))[1].role == ModelRole("draft", "draft.", True)


def test_what_is_the_targets_is_known_and_a_copy_is_not(sglang: SimpleNamespace) -> None:
    def share(target: Any, draft: Any) -> None:
        draft.weight = target.weight

    def copy(target: Any, draft: Any) -> None:
        draft.weight = nn.Parameter(target.weight.detach().clone())

    assert len(load_both(runner("draft"), share=share)) == 2
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_COPIES.message)):
        load_both(runner("draft"), share=copy)


def test_another_dtype_is_refused(sglang: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_DTYPE.message)):
        load_both(runner("draft", dtype=torch.float16))


def test_dummy_weights_are_refused(sglang: SimpleNamespace) -> None:
    dummy = runner("draft")
    dummy.reads = None
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_WITHOUT_CHECKPOINT.message)):
        load_both(dummy)


def test_a_token_map_is_refused(sglang: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_TOKEN_MAP.message)):
        load_both(runner("draft"), hot_token_id=torch.arange(3))


@pytest.mark.parametrize(
    "make", [OtherWorker, lambda own: EAGLEWorkerV2(own, own), lambda own: EAGLEWorkerV2("another")]
)
def test_a_worker_that_may_serve_other_weights_is_refused(
    make: Callable[..., Any], sglang: SimpleNamespace
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_MODEL.message)):
        load_both(runner("draft"), make)


def test_a_second_draft_model_is_not_loaded(sglang: SimpleNamespace) -> None:
    target = Observed(ModelRole("target", "", True), runner("target"), None, None)
    draft.expect(target, None, None, list)  # type: ignore[arg-type]
    loaded: list[str] = []
    draft.load(runner("draft"), lambda: loaded.append("first"))
    with pytest.raises(RuntimeError, match=re.escape(refusals.DRAFT_MODEL.message)):
        draft.load(runner("draft"), lambda: loaded.append("second"))
    assert loaded == ["first"]
