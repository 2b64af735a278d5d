"""The board that HTTP processes share: its items, their leases, and the ranks that keep it."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.ranks.board import Board
from engine_ext.ranks.operations import BoardItem


def put(board: Board, value: Any, expected: int, **more: Any) -> BoardItem:
    return board.put("key", value, expected=expected, **more)


def lease(board: Board, holder: str, **more: Any) -> tuple[bool, BoardItem]:
    return board.lease("key", holder, **more)


# Values ----------------------------------------------------------------------------------------


def test_an_item_is_empty_before_the_first_put() -> None:
    assert Board().get("key") == BoardItem()


def test_a_put_changes_the_value_and_the_revision() -> None:
    board = Board()
    first = put(board, {"a": 1}, 0)
    assert (first.value, first.written) == ({"a": 1}, True)
    second = put(board, [2], first.revision)
    assert (second.value, second.written) == ([2], True)
    assert second.revision != first.revision
    assert board.get("key").value == [2]
    assert board.get("other") == BoardItem()


def test_a_put_over_another_revision_is_refused() -> None:
    board = Board()
    put(board, "first", 0)
    refused = put(board, "second", 0, append="entry", most=3)
    assert (refused.value, refused.written) == ("first", False)
    assert board.get("key").entries == []
    assert put(board, "second", refused.revision).written


def test_only_the_last_entries_are_kept() -> None:
    board, revision = Board(), 0
    for number in range(10):
        answer = put(board, None, revision, append=number, most=3)
        assert answer.entries == []
        revision = answer.revision
    assert put(board, None, revision).written
    assert board.get("key").entries == [7, 8, 9]


def test_entries_alone_are_no_change_to_others() -> None:
    board = Board()
    seen = put(board, "same", 0).revision
    assert put(board, "same", seen, append="of a", most=2).written
    assert put(board, "same", seen, append="of b", most=2).written
    assert board.get("key").entries == ["of a", "of b"]


# Leases ----------------------------------------------------------------------------------------


def test_one_process_at_a_time_holds_a_lease() -> None:
    board = Board()
    assert lease(board, "a")[0]
    refused, item = lease(board, "b")
    assert (refused, item.holder) == (False, "a")
    assert not lease(board, "b", instead_of="c")[0]
    assert lease(board, "a")[0]
    board.release("key", "a")
    assert board.get("key").holder is None
    assert lease(board, "b") == (True, board.get("key"))
    assert board.lease("other", "a")[0]


def test_a_dead_holder_loses_its_lease() -> None:
    board = Board()
    lease(board, "a")
    assert lease(board, "b", instead_of="a")[0]
    assert not lease(board, "c", instead_of="a")[0]
    seen = board.get("key")
    assert not board.release("key", "a", value="late", expected=seen.revision).written
    assert board.get("key") == seen


def test_a_lease_puts_what_its_holder_alone_has_seen() -> None:
    board = Board()
    _, item = lease(board, "a", value="one", expected=0)
    assert (item.value, item.written) == ("one", True)
    item = board.release("key", "a", value="two", expected=item.revision)
    assert (item.value, item.written) == ("two", True)
    _, item = lease(board, "a", value="three", expected=item.revision)
    assert (item.value, item.written) == ("three", True)


@pytest.mark.parametrize("dies", [False, True])
def test_a_lease_puts_nothing_after_another_holder(dies: bool) -> None:
    """What a process sees while another one holds the lease can be that one's work."""
    board = Board()
    lease(board, "a", value="of a", expected=0)
    seen = lease(board, "b")[1].revision
    if not dies:
        seen = board.release("key", "a", value="of a", expected=seen).revision
    dead = "a" if dies else None
    granted, item = lease(board, "b", value="of b", expected=seen, instead_of=dead)
    assert (granted, item.value, item.written) == (True, "of a", False)
    again = lease(board, "b", value="of b", expected=item.revision)[1]
    assert (again.value, again.written) == ("of b", True)


def test_a_lease_puts_nothing_over_another_revision() -> None:
    board = Board()
    _, item = lease(board, "a", value="one", expected=0)
    put(board, "of b", item.revision)
    assert not lease(board, "a", value="two", expected=item.revision)[1].written
    released = board.release("key", "a", value="two", expected=item.revision)
    assert (released.value, released.written, released.holder) == ("of b", False, None)
