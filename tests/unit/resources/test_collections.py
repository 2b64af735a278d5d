"""Full garbage collections are put off inside a block, and nothing else changes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from engine_ext.resources import no_full_collections

pytestmark = pytest.mark.slow

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Exclude the objects of other modules, so that a full collection follows a few objects."""
    before = gc.get_threshold()
    gc.freeze()
    gc.collect()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.own = self


def full_collections(objects: int) -> int:
    """Return how many full collections were made while so many objects were made and kept."""
    before = gc.get_stats()[2]["collections"]
    kept = [Cycle() for _ in range(objects)]
    made: int = gc.get_stats()[2]["collections"] - before
    return made if kept else 0


def test_no_full_collection_is_made_inside() -> None:
    objects = 300_000
    assert len(gc.get_objects()) < objects
    assert full_collections(objects) > 0
    with no_full_collections():
        assert full_collections(objects) == 0
        assert gc.isenabled()
    assert full_collections(objects) > 0


@pytest.mark.parametrize("fails", [False, True])
def test_young_objects_are_collected_as_before(fails: bool) -> None:
    try:
        with no_full_collections():
            assert gc.get_threshold()[:2] == USUAL[:2]
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert gc.get_threshold() == USUAL


def test_blocks_that_overlap_in_threads() -> None:
    """It ends with the last one, in whatever order."""
    first, second = no_full_collections(), no_full_collections()
    first.__enter__()
    inside = gc.get_threshold()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == inside != USUAL
    second.__exit__(None, None, None)
    assert gc.get_threshold() == USUAL


def test_what_somebody_else_sets_meanwhile_is_kept() -> None:
    with no_full_collections():
        gc.set_threshold(5000, 20, 30)
    assert gc.get_threshold() == (5000, 20, 30)


def test_a_forked_process_is_outside() -> None:
    with no_full_collections():
        child = os.fork()
        if child == 0:
            with no_full_collections():
                inside = gc.get_threshold()[2] > USUAL[2]
            os._exit(0 if inside and gc.get_threshold() == USUAL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_threshold() != USUAL


def test_a_collector_that_is_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with no_full_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.set_threshold(0)
    with no_full_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
