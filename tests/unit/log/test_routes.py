"""Which way leads through a log, from the versions that it lists alone."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.log.catalog import (
    DONE,
    Entry,
    FileFacts,
    Listing,
    folder_name,
    route,
    why_not_newer,
)
from tests.support.served_models import PROPERTY


def entry(base: int | None, version: int, nbytes: int = 1) -> Entry:
    name = folder_name(version, base)
    return Entry(Path(name), version, base, {"a": FileFacts(nbytes, "")}, nbytes)


def way(entries: list[Entry], version: int | None) -> list[tuple[int | None, int]]:
    return [(step.base_version, step.version) for step in route(entries, version)]


def test_the_way_leads_version_by_version() -> None:
    chain = [entry(k, k + 1) for k in range(5)]
    assert way(chain, 2) == [(2, 3), (3, 4), (4, 5)]
    assert way(chain, 5) == []
    assert way([], 0) == []


def test_the_way_ends_before_a_gap() -> None:
    assert way([entry(0, 1), entry(2, 3)], 0) == [(0, 1)]
    assert way([entry(0, 1), entry(2, 3)], 1) == []


def test_the_lightest_way_is_taken() -> None:
    chain = [entry(k, k + 1, 10) for k in range(3)]
    assert way([*chain, entry(0, 2, 15)], 0) == [(0, 2), (2, 3)]
    assert way([*chain, entry(0, 2, 25)], 0) == [(0, 1), (1, 2), (2, 3)]
    assert way([*chain, entry(None, 3, 29)], 0) == [(None, 3)]
    assert way([*chain, entry(None, 3, 31)], 0) == [(0, 1), (1, 2), (2, 3)]


def test_a_full_version_bridges_a_gap() -> None:
    entries = [entry(0, 1), entry(None, 5), entry(5, 6)]
    assert way(entries, 3) == [(None, 5), (5, 6)]
    assert way(entries, 0) == [(None, 5), (5, 6)]
    assert way(entries, None) == [(None, 5), (5, 6)]
    assert way(entries[:1], None) == []


def test_of_two_ways_that_part_the_newer_counts() -> None:
    assert way([entry(0, 1), entry(1, 2), entry(1, 3)], 0) == [(0, 1), (1, 3)]


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 8), st.integers(1, 9)), max_size=12),
    st.none() | st.integers(0, 9),
)
@PROPERTY
def test_every_way_holds_together(pairs: list[tuple[int | None, int]], version: int | None) -> None:
    entries = [entry(base, to) for base, to in pairs if base is None or base < to]
    at = version
    for step in route(entries, version):
        assert step.full or step.base_version == at
        assert at is None or step.version > at
        at = step.version
    reachable = set() if version is None else {version}
    for step in sorted(entries, key=lambda step: step.version):
        newer = version is None or step.version > version
        if newer and (step.full or step.base_version in reachable):
            reachable.add(step.version)
    assert at == max(reachable, default=None)


def test_why_there_is_nothing_newer() -> None:
    assert why_not_newer(Listing(), 0) is None
    whole = Listing([entry(0, 1), entry(1, 2), entry(2, 3)])
    assert why_not_newer(whole, 3) is None
    broken = Listing([entry(0, 1), entry(2, 3)], damaged={"weight_v000002": f"no {DONE}"})
    why = why_not_newer(broken, 1) or ""
    assert "leads on from version 1" in why
    assert "weight_v000002" in why
    many = Listing(damaged={folder_name(version): "" for version in range(1000, 5000)})
    why = why_not_newer(many, 1) or ""
    assert "damaged: weight_v001000, weight_v001001, " in why
    assert why.endswith(" and 3995 more")
