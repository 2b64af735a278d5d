"""Deltas of one tensor that are added up: what is left, and what that costs."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.format import ParamDelta, encode_part
from engine_ext.log import CannotFold, fold_versions, open_log, verify_version
from engine_ext.log.merged import MergedDelta, add_delta
from engine_ext.log.spilled import SpilledDeltas
from tests.support.served_models import PROPERTY

pytestmark = pytest.mark.slow

NUMEL = 64
VERSIONS = 120
BIG = 400_000


def delta(changes: dict[int, int] | None, numel: int = NUMEL, dense: int = 0) -> ParamDelta:
    if changes is None:
        return ParamDelta("w", "bfloat16", (numel,), None, np.full(numel, dense, np.uint16))
    indices = np.array(sorted(changes), np.int64)
    values = np.array([changes[index] for index in sorted(changes)], np.uint16)
    return ParamDelta("w", "bfloat16", (numel,), indices, values)


changes = st.dictionaries(st.integers(0, NUMEL - 1), st.integers(0, 65535), max_size=12)


@given(st.lists(st.one_of(changes, st.none()), min_size=1, max_size=12))
@settings(PROPERTY, max_examples=60)
def test_the_last_value_of_an_element_stays(steps: list[dict[int, int] | None]) -> None:
    expected: dict[int, int] = {}
    merged: dict[str, MergedDelta] = {}
    for number, step in enumerate(steps):
        add_delta(merged, delta(step, dense=number))
        expected |= dict.fromkeys(range(NUMEL), number) if step is None else step
        values, changed = merged["w"].at(np.arange(NUMEL))
        known = range(NUMEL) if changed is None else np.flatnonzero(changed).tolist()
        assert {place: int(values[place]) for place in known} == expected
    result = merged["w"].result()
    places = range(NUMEL) if result.indices is None else result.indices.tolist()
    assert dict(zip(places, result.values.tolist(), strict=True)) == expected
    assert list(places) == sorted(expected)


def test_nothing_of_another_dtype_is_added() -> None:
    merged = MergedDelta(delta({1: 2}))
    other = ParamDelta("w", "uint16", (NUMEL,), np.array([3]), np.array([4], np.uint16))
    with pytest.raises(CannotFold):
        merged.add(other)
    assert merged.result().values.tolist() == [2]


@pytest.mark.parametrize("kinds", [["sparse"], ["dense"], ["sparse", "dense", "sparse"]])
def test_no_buffer_of_a_part_is_kept(kinds: list[str]) -> None:
    merged: dict[str, MergedDelta] = {}
    buffers = []
    with SpilledDeltas() as spilled:
        for kind in kinds:
            buffer = np.zeros(2 * NUMEL, np.uint16)
            buffers.append(weakref.ref(buffer))
            indices = np.arange(3) if kind == "sparse" else None
            values = buffer[: 3 if kind == "sparse" else NUMEL]
            one = ParamDelta("w", "bfloat16", (NUMEL,), indices, values)
            add_delta(merged, one)
            spilled.add([one])
            del buffer, values, one
        assert [buffer() for buffer in buffers] == [None] * len(kinds)
        assert same_delta(merged["w"].result(), spilled.result("w"))


def same_delta(one: ParamDelta, other: ParamDelta) -> bool:
    if one.indices is None or other.indices is None:
        assert one.indices is other.indices
        return np.array_equal(one.values, other.values)
    same_places = np.array_equal(one.indices, other.indices)
    return same_places and np.array_equal(one.values, other.values)


def test_many_versions_cost_what_reading_them_costs(tmp_path: Path) -> None:
    """Not more with every version that was folded before."""
    log, rng = open_log(tmp_path), np.random.default_rng(0)
    with log.writer() as writer:
        for version in range(1, VERSIONS + 1):
            indices = np.unique(rng.integers(0, BIG, BIG // 50))
            values = rng.integers(0, 65536, indices.size).astype(np.uint16)
            one = ParamDelta("w", "bfloat16", (BIG,), indices, values)
            draft = writer.begin(version)
            draft.add(encode_part([one], encoding="gap8_exp", current_version=version))
            draft.finish()
    entries = log.listing().entries
    verify_version(entries[0])  # what decodes is compiled

    def seconds(work: Any) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    read = seconds(lambda: [verify_version(entry) for entry in entries])
    assert seconds(lambda: fold_versions(log, entries, 0)) < 4 * read + 0.5
