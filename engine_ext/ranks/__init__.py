"""The ranks of one engine: the operations that the HTTP side calls on them, and votes among them.

`operations` has the requests and `replies` the answers, which cross processes as msgpack; `status`
has what the HTTP side makes of them for ``GET /delta_status``. `board` has what the HTTP processes
of an engine share. `group` has the ranks of one process group, `replicas` lets the first ranks of
several vote.

Imports: `engine_ext.format`, and the ground floor.
"""

from engine_ext.ranks.board import ENGINE, LOG_RECORDS, Board
from engine_ext.ranks.group import (
    Bytes,
    GroupRanks,
    RankGroup,
    SingleRank,
    cores_per_rank,
    gather_bytes,
    run_on_all_or_none,
)
from engine_ext.ranks.replicas import ReplicaRanks, among_replicas

__all__ = [
    "ENGINE",
    "LOG_RECORDS",
    "Board",
    "Bytes",
    "GroupRanks",
    "RankGroup",
    "ReplicaRanks",
    "SingleRank",
    "among_replicas",
    "cores_per_rank",
    "gather_bytes",
    "run_on_all_or_none",
]
