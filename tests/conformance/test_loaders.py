"""Every loader treatment: exact, or refused with nothing changed. There is no third outcome."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_ext.conformance.cases import CASES, Case
from engine_ext.conformance.judge import EXACT, REFUSED, judge
from engine_ext.conformance.subject import SubjectFactory
from engine_ext.conformance.syncs import Setup, Sync, syncs_of
from engine_ext.conformance.toy_models import ToyModel

pytestmark = pytest.mark.slow

LOADERS = [(case, setup) for case in CASES for setup in case.setups]


def loader_id(loader: tuple[Case, Setup]) -> str:
    case, setup = loader
    return f"{case.name}-{setup[0].__name__}"


def own_syncs(case: Case, setup: Setup, receiver: str) -> Iterator[Sync]:
    """Yield what this project's receivers are given; the table of the documentation has all.

    If nothing is computed after loading and nothing refused, `tests/unit/sync/test_appliers.py`
    sends each tensor alone, and the properties of both ways to apply draw how many elements change.
    The masked apply refuses most tensors of a loader that it does not carry, so none goes alone.
    """
    copies = setup[0].after_loading is ToyModel.after_loading and not setup[0].refused
    in_unit_tests = copies and len(setup) == 1 and ".toy_models" in setup[0].__module__
    is_carried = receiver == "scatter" or receiver in case.carried
    for sync in syncs_of(setup):
        alone = sync.group == "alone"
        if in_unit_tests and (alone or sync.name == "sparse 0.5 %"):
            continue
        if is_carried or not alone:
            yield sync


@pytest.mark.parametrize("loader", LOADERS, ids=loader_id)
def test_exact_or_refused(
    loader: tuple[Case, Setup], subject: SubjectFactory, is_own: bool
) -> None:
    case, setup = loader
    receiver = subject().name
    violations = {}
    for sync in own_syncs(case, setup, receiver) if is_own else syncs_of(setup):
        verdict = judge(setup, sync, subject)
        must = is_own and receiver in case.carried and sync.group == "sparse"
        if verdict.outcome not in ((EXACT,) if must else (EXACT, REFUSED)):
            violations[sync.name] = verdict
    assert violations == {}
