"""Predict the memory that a sync takes, besides the weights of trainer and engine."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.model import part_bytes
from scripts.bench.scaling.setups import Setup

_KEPT_SHARE = 1 / 4  # of the snapshot; what exceeds it is spilled, see `delta_sender.diff.spill`
_READ_WORKERS = 4  # parts that a rank stages at a time, see `engine_ext.settings`
_UPLOADS = 16  # parts that an HTTP process takes at a time, see there


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a sync.

    Attributes:
        snapshot: of each trainer host; always there.
        changes: of each trainer host, until the commit.
        parts: of each trainer host: bodies in flight, and parts that are being encoded.
        spool: of an engine's host, in shared memory.
        staged: of each rank, until the commit.
        undo: of each rank: old values of the version before; always there after the first sync.
        decoded: of each rank: parts that are being staged.
        undo_limit: that ``--delta-undo-bytes`` must allow.
    """

    snapshot: float
    changes: float
    parts: float
    spool: float
    staged: float
    undo: float
    decoded: float
    undo_limit: float

    @property
    def sender(self) -> float:
        """Of each trainer host."""
        return self.snapshot + self.changes + self.parts

    @property
    def rank(self) -> float:
        """Of each rank."""
        return self.staged + self.undo + self.decoded


def memory(setup: Setup, costs: Constants) -> Memory:
    """Predict the peak memory of a sync."""
    snapshot = setup.model.nbytes / setup.trainer_hosts
    changes = setup.nnz * costs.change_bytes / setup.trainer_hosts
    body, own = part_bytes(setup, costs) * setup.largest_share, setup.nnz / setup.ranks
    part_nnz, wire = setup.part_nnz * setup.largest_share, part_bytes(setup, costs) * setup.parts
    posts = min(setup.posts_in_flight, setup.parts)
    most_uploads = _UPLOADS * setup.http_processes
    uploads = min(setup.posts_in_flight * setup.trainer_hosts, most_uploads, setup.parts)
    encoders = min(setup.encoders, setup.trainer_cores, setup.parts)
    return Memory(
        snapshot=snapshot,
        changes=min(changes, snapshot * _KEPT_SHARE),
        parts=min(posts * body, wire) + min(encoders * part_nnz, setup.nnz) * costs.encode_bytes,
        spool=min(uploads * body, wire),
        staged=own * costs.staged_bytes,
        undo=own * costs.undo_bytes,
        decoded=min(min(uploads, _READ_WORKERS) * part_nnz, setup.nnz) * costs.decode_bytes,
        undo_limit=own * costs.undo_bytes,
    )
