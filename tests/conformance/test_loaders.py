"""Every loader treatment: exact, or refused with nothing changed. There is no third outcome."""

from __future__ import annotations

import pytest

from engine_ext.conformance.cases import CASES, Case
from engine_ext.conformance.judge import EXACT, REFUSED, judge
from engine_ext.conformance.subject import SubjectFactory
from engine_ext.conformance.syncs import Setup, Sync

pytestmark = pytest.mark.slow

RUNS = [(case, setup, sync) for case in CASES for setup, sync in case.runs()]


def run_id(run: tuple[Case, Setup, Sync]) -> str:
    case, setup, sync = run
    return f"{case.name}-{setup[0].__name__}-{sync.name}"


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_exact_or_refused(
    run: tuple[Case, Setup, Sync], subject: SubjectFactory, is_own: bool
) -> None:
    case, setup, sync = run
    verdict = judge(setup, sync, subject)
    assert verdict.outcome in (EXACT, REFUSED), verdict.detail
    if is_own and subject().name in case.carried and sync.group == "sparse":
        assert verdict.outcome == EXACT, verdict.detail
