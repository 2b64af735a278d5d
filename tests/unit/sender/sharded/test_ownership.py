"""Each element has one owner, and shards that do not make up a tensor are refused."""

from __future__ import annotations

import pytest

from delta_sender.sharded.ownership import Held, Ownership


def rows(name: str, start: int, stop: int, of: int = 8, dtype: str = "bfloat16") -> Held:
    return Held(name, dtype, (of, 2), (start, 0), (stop - start, 2))


def test_replicas_share_what_they_own() -> None:
    """Two replicas of two shards each, as HSDP 2x2 has."""
    names = [f"layers.{i}" for i in range(6)]
    ranks = [[rows(name, *half) for name in names] for half in ((0, 4), (4, 8)) for _ in range(2)]
    ownership = Ownership(ranks)
    assert list(ownership) == names
    owned = [ownership.of_rank(rank) for rank in range(4)]
    assert [len(one) for one in owned] == [3, 3, 3, 3]
    assert owned[0].keys() | owned[1].keys() == set(names)
    assert not owned[0].keys() & owned[1].keys()
    assert {tensor.assembler for tensor in ownership.values()} == {0, 1, 2, 3}


def test_a_parameter_on_meshes_of_its_own_is_owned_once() -> None:
    """With tensor parallelism, norms are on two meshes of one dimension that do not meet."""
    ranks = [[rows("norm", 0, 4)], [rows("norm", 0, 4)], [rows("norm", 4, 8)], [rows("norm", 4, 8)]]
    ownership = Ownership(ranks)
    assert [rank for _, rank in ownership["norm"].owners] == [0, 2]


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([[rows("w", 0, 4)], [rows("w", 3, 8)]], "w: shards overlap .*0:4, 0:2.*3:8, 0:2"),
        ([[rows("w", 0, 4)], [rows("w", 5, 8)]], "w: the shards have 14 of 16 elements"),
        ([[rows("w", 0, 4)], [rows("w", 4, 8, dtype="float32")]], "w: float32.*rank 1, but bfl"),
        ([[rows("w", 0, 4)], [rows("w", 4, 9, of=9)]], r"w: bfloat16 \[9, 2\] on rank 1"),
        ([[rows("w", 0, 4), rows("w", 4, 8)], []], "w: two shards on rank 0"),
    ],
)
def test_shards_that_do_not_make_up_a_tensor(ranks: list[list[Held]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Ownership(ranks)
