"""The costs that the model is made of, as one machine has them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path


@dataclass(frozen=True)
class Constants:
    """Costs on one machine; `scripts.bench.scaling.measure` measures them.

    Names that end in ``_ns`` are nanoseconds of one core. Those with a dict are by encoding,
    unless they say otherwise.

    Attributes:
        machine: what they were measured on.
        engine: whose fixed costs they are, by its name in `scripts.live_engine.registry`.
        density: share of elements that changed in the measurements.

        diff_ns: comparing, per element of the model; this and the next with all cores busy.
        change_ns: per changed element: copying index, old and new bits, digest, gap stream.
        digest_ns: the digest alone, per changed element.
        encode_ns: per changed element.
        refresh_ns: writing into the snapshot, per changed element.
        snapshot_digest_ns: the digest of every element, per element; once, before the first sync.
        value_bytes: bytes of a changed element on the wire, without its gap's entropy.
        send_ns: posting, per byte of a part.

        receive_ns: the HTTP process, per byte of a part: HTTP, checks, spool, hash.
        hash_ns: the hash alone, per byte.
        loopback_ns: wall time of a post on the loopback interface, per byte; what its two ends take
            above is part of it.

        alone_ns: verifying, decoding and staging on an engine of one rank, which shares nothing and
            has every tensor in one run of memory; per changed element. The others are of several.
        decode_ns: verifying and decoding, and leaving that to all ranks, per changed element.
        stage_own_ns: staging what was decoded, per changed element that the rank holds.
        stage_other_ns: staging, per changed element of the part that other ranks hold.
        locate_own_ns, locate_other_ns, read_ns: what of it finds the elements, and reads old bits.
        check_ns: what is compared in the commit before anything is written, per own element.
        scatter_ns: comparing and writing, per own element.
        finish_ns: the rest of the commit, per own element.

        sender_param_ns: a tensor in a sync of the sender, whatever its size; wall time, as its
            threads take turns under the interpreter's lock.
        rank_param_ns: decoding and staging it, on each rank, likewise.
        commit_param_ns: checking and writing it, on each rank, likewise.
        waiting_share: of the speed of a sync's work, what is left if as many threads as cores wait
            in a loop and yield.
        one_host_speed: of the speed at which parts follow each other by all these, what there is
            if sender, HTTP process and ranks share their cores: they wait for each other. At most
            1; of an engine with two ranks.
        part_s: wall seconds of one more part of an engine, besides its bytes and elements.
        sync_s: wall seconds of one sync of an engine, besides its parts: pause, votes, publishing.
        pause_s: of them, for which generation is paused.
        alone_part_s, alone_sync_s, alone_pause_s: the same of an engine of one rank.
        part_cpu: CPU seconds of one more part, besides its bytes and elements, of the ``sender``,
            the HTTP ``server``, and the threads of each ``rank``.
        alone_part_cpu: the same of an engine of one rank.

        change_bytes: that the sender keeps until the commit, per changed element.
        encode_bytes: that are needed while a part is encoded, per changed element of it.
        decode_bytes: that are needed while a part is decoded and staged, per changed element of it.
        staged_bytes: that a rank keeps until the commit, per own element.
        undo_bytes: that a rank keeps of the version before, per own element.
    """

    machine: str
    engine: str
    density: float

    diff_ns: float
    change_ns: float
    digest_ns: float
    refresh_ns: float
    snapshot_digest_ns: float
    send_ns: float

    receive_ns: float
    hash_ns: float
    loopback_ns: float

    stage_own_ns: float
    stage_other_ns: float
    locate_own_ns: float
    locate_other_ns: float
    read_ns: float
    check_ns: float
    scatter_ns: float
    finish_ns: float

    sender_param_ns: float
    rank_param_ns: float
    commit_param_ns: float
    waiting_share: float
    one_host_speed: float
    part_s: float
    sync_s: float
    pause_s: float
    alone_part_s: float
    alone_sync_s: float
    alone_pause_s: float

    change_bytes: float
    encode_bytes: float
    decode_bytes: float
    staged_bytes: float
    undo_bytes: float

    encode_ns: dict[str, float] = field(default_factory=dict)
    alone_ns: dict[str, float] = field(default_factory=dict)
    decode_ns: dict[str, float] = field(default_factory=dict)
    value_bytes: dict[str, float] = field(default_factory=dict)
    part_cpu: dict[str, float] = field(default_factory=dict)
    alone_part_cpu: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Constants:
        """Read a file that `save` has written.

        Raises:
            OSError: It cannot be read.
            ValueError: It has other fields.
        """
        found = json.loads(path.read_text())
        names = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            raise ValueError(f"{path} has no constants of this version: measure them again")
        return cls(**found)

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
