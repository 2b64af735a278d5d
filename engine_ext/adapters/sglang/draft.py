"""The draft model of SGLang's speculative decoding, which is updated together with the target.

SGLang loads it after the target, by a runner of its own. When the memory pools are made, it gives
EAGLE heads and MTP layers the target's embedding and output head. Which tensors the two models
share is known only then, so the receiver is made after that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

from engine_ext.adapters.refusals import Refusal
from engine_ext.adapters.sglang import refusals
from engine_ext.adapters.sglang.checkpoint import Observer, checkpoint, observer_of
from engine_ext.adapters.target_and_draft import DRAFT, PREFIX, TARGET, ModelRole
from engine_ext.ranks import replicas
from engine_ext.startup import LoadingTrace, UnprocessedModules

_FOLLOWED: Final = ("EAGLE", "EAGLE3", "STANDALONE")
_REVISION: Final = "main"

# Observers of the draft model's load; a process loads at most one, after its target.
_expected: list[Callable[[Any, Callable[[], None]], None]] = []


def target_role(runner: Any) -> ModelRole:
    """Return the role of the model that a target's runner is about to load.

    Raises:
        RuntimeError: syncs might not reach all weights of its draft model. SGLang does not start
            then.
    """
    algorithm = runner.spec_algorithm
    if algorithm.is_none() or algorithm.is_ngram():
        return ModelRole("", "", True)
    refusal = _unsupported(algorithm)
    if refusal is not None:
        raise RuntimeError(refusal.message)
    return ModelRole(TARGET, "", True)


def _unsupported(algorithm: Any) -> Refusal | None:
    from sglang.srt.runtime_context import get_parallel

    if algorithm.name not in _FOLLOWED:
        return refusals.DRAFT_MODEL
    if get_parallel().pp_size > 1:
        return refusals.DRAFT_WITH_STAGES
    if replicas.count() > 1:
        return refusals.DRAFT_WITH_REPLICAS
    return None


def expect(
    target: Observer,
    loading: LoadingTrace,
    states: UnprocessedModules,
    then: Callable[[list[Observer]], None],
) -> None:
    """Observe the draft model when it is loaded; call `then` with both models as they serve."""
    from sglang.srt.managers.scheduler import Scheduler

    observed = [target]
    loaded: list[weakref.ref[Any]] = []  # what SGLang replaces is not kept

    def observe(runner: Any, load: Callable[[], None]) -> None:
        draft = observer_of(_draft_role(target.engine.runner, runner), runner, loading, states)
        with draft:
            load()
        observed.append(draft)
        loaded.extend(map(weakref.ref, runner.model.parameters()))

    original = Scheduler.init_memory_pools

    @functools.wraps(original)
    def init_memory_pools(scheduler: Any) -> None:
        Scheduler.init_memory_pools = original
        _expected.clear()
        original(scheduler)
        _require_known(scheduler.draft_worker, observed, loaded)
        then(observed)

    _expected[:] = [observe]
    Scheduler.init_memory_pools = init_memory_pools


def load(runner: Any, load_now: Callable[[], None]) -> None:
    """Load a draft model; RuntimeError if no target expects it."""
    if not _expected:
        raise RuntimeError(refusals.DRAFT_MODEL.message)
    observe = _expected.pop()  # SGLang would load the draft models of several layers one by one
    observe(runner, load_now)


def _draft_role(target: Any, runner: Any) -> ModelRole:
    """Return the role of the draft model that its runner is about to load."""
    models = [one.model_config for one in (target, runner)]
    if models[0].dtype != models[1].dtype:
        raise RuntimeError(refusals.DRAFT_DTYPE.message)
    # SGLang names the default revision of a draft model only.
    same = len({(model.model_path, model.revision or _REVISION) for model in models}) == 1
    return ModelRole(DRAFT, "" if same else PREFIX, not same)


def _require_known(worker: Any, observed: list[Observer], loaded: list[weakref.ref[Any]]) -> None:
    """Refuse a worker that might serve other weights than the two models'."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

    runners = [runner for _, runner in worker.weight_update_runners()]
    known_runners = [one.engine.runner for one in observed]
    if type(worker) not in (EAGLEWorkerV2, StandaloneWorkerV2) or runners != known_runners[1:]:
        raise RuntimeError(refusals.DRAFT_MODEL.message)
    if any(checkpoint(one, one.model) is None for one in known_runners):
        raise RuntimeError(refusals.DRAFT_WITHOUT_CHECKPOINT.message)
    if worker.draft_worker.hot_token_id is not None:
        raise RuntimeError(refusals.DRAFT_TOKEN_MAP.message)
    targets, drafts = [list(one.model.parameters()) for one in known_runners]
    known = {id(parameter) for parameter in [*targets, *(reference() for reference in loaded)]}
    if any(id(parameter) not in known for parameter in drafts):
        raise RuntimeError(refusals.DRAFT_COPIES.message)
