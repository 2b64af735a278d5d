"""Which copies are compared at a sync, and how they are."""

from __future__ import annotations

import pytest
import torch

from delta_sender.sharded import copies
from delta_sender.sharded.box import Box
from delta_sender.sharded.copies import Copies, differing
from delta_sender.sharded.ownership import Held, Ownership

WHOLE = (4,)


def held(name: str, offset: int = 0, size: int = 4) -> Held:
    return Held(name, "float32", WHOLE, (offset,), (size,))


def test_those_that_several_ranks_hold_are_compared_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "_AT_A_SYNC", 32)  # two tensors
    shared = [held(name) for name in "abc"]
    found = Copies(Ownership([[*shared, held("d", 0, 1)], [*shared, held("d", 1, 3)]]))
    assert found.every() == {*"abc"}
    assert [found.following() for _ in range(3)] == [{*"ab"}, {*"ca"}, {*"bc"}]


def test_a_tensor_above_the_limit_is_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_AT_A_SYNC", 1)
    found = Copies(Ownership([[held("a"), held("b")]] * 2))
    assert [found.following() for _ in range(3)] == [{"a"}, {"b"}, {"a"}]


def test_without_copies() -> None:
    found = Copies(Ownership([[held("a", 0, 1)], [held("a", 1, 3)]]))
    assert (found.every(), found.following()) == (frozenset(), frozenset())
    assert found.digest("a", Box(WHOLE, (0,), (1,)), torch.zeros(1)) is None


def test_bits_are_compared() -> None:
    found = Copies(Ownership([[held("a")]] * 2))
    zeros, same, other = torch.zeros(4), torch.zeros(4), -torch.zeros(4)
    digests = [dict([found.digest("a", Box.whole(WHOLE), t) or ("", "")]) for t in (zeros, same)]
    assert differing(digests) == {}
    digests.append(dict([found.digest("a", Box.whole(WHOLE), other) or ("", "")]))
    assert differing(digests) == {"a[0:4]": [0, 2]}
