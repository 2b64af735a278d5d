"""What a group of followers prepares next, and which marks count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine_ext.log import (
    DeltaLog,
    Entry,
    GroupMarks,
    Heartbeat,
    Listing,
    complete_versions,
    content_key,
    next_target,
)
from engine_ext.log.catalog import FileFacts, Publication
from tests.unit.log.places import part, write


def entry(version: int, base: int | None = None, content: int = 0, **facts: Any) -> Entry:
    name = f"weight_v{version:06d}" + ("" if base is None else f"_from_v{base:06d}")
    files = {"part": FileFacts(1, f"{content or version:032x}")}
    base = version - 1 if base is None else base
    return Entry(Path("log") / name, version, base, {**files}, 1, **facts)


LISTING = Listing([entry(version) for version in range(6, 10)])


def key(version: int) -> str:
    found = content_key(LISTING, version)
    assert found is not None
    return found


def member(version: int = 5, prepared: int | None = None, **facts: Any) -> Heartbeat:
    known: dict[str, Any] = {"name": "a", "engine": "vllm", "newest": 9, "behind": 4}
    known |= {"state": "following", "failures": 0, "at": 0.0, "expires_s": 120.0, "reach": 9}
    known |= {"prepared": None if prepared is None else key(prepared), "group": "g"}
    return Heartbeat(version=version, **(known | facts))


@pytest.mark.parametrize(
    ("members", "target"),
    [
        ([member()], 9),
        ([member(), member(reach=7)], 7),  # it cannot make more than that one sync
        ([member(), member(reach=5), member(reach=None)], 9),  # they have not looked, or fail
        ([member(), member(prepared=7)], 7),
        ([member(prepared=8), member(prepared=7)], 7),
        ([member(), member(prepared=7), member(cannot=[7])], 9),
        ([member(reach=9), member(reach=8, cannot=[9])], 8),
        ([member(version=7), member(version=5, prepared=6)], 9),  # that one has not read the mark
        ([member(version=9), member(version=5, prepared=8)], None),
        ([member(reach=5), member(reach=5)], None),
    ],
)
def test_the_next_target(members: list[Heartbeat], target: int | None) -> None:
    found = next_target(members[0], members[1:], LISTING)
    assert found == (None if target is None else (target, key(target)))


def test_what_was_prepared_of_another_log_is_left_alone() -> None:
    other = Listing([entry(version, content=version + 100) for version in range(6, 10)])
    stale = content_key(other, 7)
    assert stale is not None
    found = next_target(member(), [structs.replace(member(), prepared=stale)], LISTING)
    assert found == (9, key(9))


def test_the_digest_names_the_content_on_every_route() -> None:
    said = Publication(at=0.0, digest_after="a" * 32)
    direct, folded = entry(9, publication=said), entry(9, 5, content=99, publication=said)
    assert content_key(Listing([direct]), 9) == content_key(Listing([folded]), 9)
    also = entry(9, 5, content=99)  # neither declares a digest
    assert content_key(Listing([entry(9)]), 9) == content_key(Listing([entry(9), also]), 9)
    assert content_key(Listing([direct]), 8) is None


@pytest.mark.parametrize("facts", [{"foreign": True, "files": {}}, {"files": {"part": None}}])
def test_a_version_without_hashes_is_known_by_its_time(facts: dict[str, Any]) -> None:
    """Another trainer has written it again, with other content of the same length."""
    one, other = (replace(entry(9), **facts, written_at=at) for at in (1.5, 2.5))
    assert content_key(Listing([one]), 9) != content_key(Listing([other]), 9)
    assert content_key(Listing([one]), 9) == content_key(Listing([replace(one)]), 9)
    hashed = replace(entry(9), written_at=2.5)  # as in a copy of the log
    assert content_key(Listing([hashed]), 9) == key(9)


def test_marks_of_a_group_are_its_own(log: DeltaLog) -> None:
    for version in range(1, 8):
        write(log, version, part(version, version - 1))
    listing = log.listing()
    marks, others = GroupMarks(log, "one"), GroupMarks(log, "two")
    for version in range(1, 7):
        found = content_key(listing, version)
        assert found is not None
        marks.write(found, ["a", "b"])
    others.read()
    assert others.newest(listing) is None
    again = GroupMarks(log, "one")
    again.read()
    assert again.newest(listing) == 6
    assert len(again.keys) == 4  # older ones mean nothing any more
    assert again.newest(listing.up_to(5)) == 5
    assert complete_versions(log, listing) == {"one": 6}


def test_a_mark_stays_below_those_of_an_earlier_log(log: DeltaLog) -> None:
    marks = GroupMarks(log, "one")
    for version in range(100, 104):
        marks.write(f"weight_v{version:06d}-{version:032x}", ["a"])
    for version in range(1, 7):
        write(log, version, part(version, version - 1))
        found = content_key(log.listing(), version)
        assert found is not None
        marks.write(found, ["a"])
        again = GroupMarks(log, "one")
        again.read()
        assert again.newest(log.listing()) == version
    marks.read()
    assert len(marks.keys) == 8  # four of each log
