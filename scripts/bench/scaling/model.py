"""Predict the time of a sync, from the costs of one machine.

A sync is a pipeline of parts. Each stage has a function here that returns the seconds of one part;
`predict` composes them: the first part, which is small, passes through all stages, and every
further one takes as long as the slowest stage. The last part is posted when all others are staged.
On top come the commit and the refresh of the sender's snapshot, which wait for all parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.encodings import gap_bytes
from scripts.bench.scaling.setups import Setup

_NS = 1e-9


@dataclass(frozen=True)
class Prediction:
    """What the model says of a sync.

    Attributes:
        stages: wall seconds of each stage for all parts, as if it ran alone.
        bound: what one more part waits for: a stage, ``cores`` (of a host, all stages together) or
            ``posts`` (that may be in flight).
        seconds: of the whole sync.
        further_s: of them, for which parts after the first are waited for.
        pause_s: for which generation is paused.
        wire_bytes: to one engine.
        cpu: CPU seconds of the sender, of the HTTP process, and of staging on one rank.
    """

    stages: dict[str, float]
    bound: str
    seconds: float
    further_s: float
    pause_s: float
    wire_bytes: float
    cpu: dict[str, float]


def part_bytes(setup: Setup, costs: Constants) -> float:
    """Return the bytes of one part: gaps at their entropy, and values as measured."""
    return setup.part_nnz * (gap_bytes(setup.density) + costs.value_bytes[setup.encoding])


def diff_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of finding a part's changes: every element, and what is kept of each one.

    `delta_sender.diff.host`: one pass over weights and snapshot; digest and gaps in the cache.
    """
    dense = setup.part_nnz / setup.density
    return (dense * costs.diff_ns + setup.part_nnz * costs.change_ns) * _NS


def encode_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of encoding a part; see `engine_ext.format.encode_part`."""
    return setup.part_nnz * costs.encode_ns[setup.encoding] * _NS


def tensors_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of a part's tensors in the sender, whatever their sizes.

    The sender's threads take turns in it, under the interpreter's lock.
    """
    return setup.part_tensors * costs.sender_param_ns * _NS


def fixed_cpu(setup: Setup, costs: Constants) -> dict[str, float]:
    """Return CPU seconds of a part besides its bytes and elements, by process."""
    return costs.alone_part_cpu if setup.ranks == 1 else costs.part_cpu


def send_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of posting a part to all engines; it is encoded once."""
    post = part_bytes(setup, costs) * costs.send_ns * _NS + fixed_cpu(setup, costs)["sender"]
    return post * setup.engines


def sender_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of the sender for a part."""
    return sum(cpu(setup, costs) for cpu in (diff_cpu, tensors_cpu, encode_cpu, send_cpu))


def receive_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of an engine's HTTP process for a part: receive, check, spool, hash."""
    return part_bytes(setup, costs) * costs.receive_ns * _NS + fixed_cpu(setup, costs)["server"]


def decode_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of verifying and decoding a part; see `engine_ext.format.decode_part`."""
    return setup.part_nnz * costs.decode_ns[setup.encoding] * _NS


def place_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of a rank for a decoded part: locate, read old values, digest.

    `engine_ext.sync.stager`: of ``ranks`` elements one is this rank's.
    """
    own = setup.part_nnz / setup.ranks
    return (own * costs.stage_own_ns + (setup.part_nnz - own) * costs.stage_other_ns) * _NS


def rank_tensors_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of a part's tensors on each rank, whatever their sizes.

    The rank's threads take turns in it, under the interpreter's lock.
    """
    return setup.part_tensors * costs.rank_param_ns * _NS


def rank_elements_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of one rank for a part's elements; its share if it is decoded once."""
    if setup.ranks == 1:
        return setup.part_nnz * costs.alone_ns[setup.encoding] * _NS
    decoders = setup.ranks if setup.decode_once else 1
    return decode_cpu(setup, costs) / decoders + place_cpu(setup, costs)


def rank_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of one rank for staging a part."""
    fixed = fixed_cpu(setup, costs)["rank"]
    return rank_elements_cpu(setup, costs) + rank_tensors_cpu(setup, costs) + fixed


def refresh_cpu(setup: Setup, costs: Constants) -> float:
    """Return CPU seconds of bringing the sender's snapshot up to date."""
    return setup.nnz * costs.refresh_ns * _NS


def free_cores(setup: Setup, costs: Constants) -> float:
    """Return the cores of a trainer host that do a sync's work, beside threads that wait."""
    waiting = min(1.0, setup.waiting / setup.trainer_cores)
    return (setup.trainer_cores - setup.taken) * (1 - waiting * (1 - costs.waiting_share))


def trainer_cores(setup: Setup, costs: Constants) -> float:
    """Return the cores of all trainer hosts that a sync has before its commit."""
    return setup.trainer_hosts * free_cores(setup, costs)


def engine_cores(setup: Setup, costs: Constants) -> float:
    """Return the cores of an engine's host that a sync has before its commit."""
    return free_cores(setup, costs) if setup.one_host else setup.engine_cores


def link(setup: Setup, costs: Constants) -> float:
    """Return seconds of a part on the busiest link: a trainer host's, or an engine's.

    Every trainer host sends its share of the parts to all engines.
    """
    fan_out = max(1.0, setup.engines / setup.trainer_hosts)
    return part_bytes(setup, costs) * fan_out / setup.bytes_per_s


def staging(setup: Setup, costs: Constants) -> float:
    """Return seconds per part on all ranks of an engine, each with its threads, side by side."""
    tensors = rank_tensors_cpu(setup, costs)
    others = rank_cpu(setup, costs) - tensors
    all_ranks = setup.ranks * rank_cpu(setup, costs) / engine_cores(setup, costs)
    return max(all_ranks, others / setup.rank_threads, tensors)


def staging_alone(setup: Setup, costs: Constants) -> float:
    """Return seconds of one part by itself: it is decoded before any rank can place it."""
    if setup.ranks == 1:
        return staging(setup, costs)
    shared = setup.ranks * rank_cpu(setup, costs) / engine_cores(setup, costs)
    decode = decode_cpu(setup, costs) / min(setup.rank_threads, engine_cores(setup, costs))
    place = place_cpu(setup, costs) / setup.rank_threads + rank_tensors_cpu(setup, costs)
    return max(shared, decode + place)


def commit(setup: Setup, costs: Constants) -> float:
    """Return seconds of a commit without its fixed costs: check, write, record."""
    own = setup.nnz / setup.ranks * (costs.check_ns + costs.scatter_ns + costs.finish_ns) * _NS
    tensors = setup.model.tensors * costs.commit_param_ns * _NS
    cores: float = setup.engine_cores
    if setup.one_host:
        cores = setup.trainer_cores - setup.taken  # no rank waits
    return max(own / setup.rank_threads + tensors, setup.ranks * (own + tensors) / cores)


def part_s(setup: Setup, costs: Constants) -> float:
    """Return the fixed seconds of a part."""
    return costs.alone_part_s if setup.ranks == 1 else costs.part_s


def sync_s(setup: Setup, costs: Constants) -> float:
    """Return the fixed seconds of a sync."""
    return costs.alone_sync_s if setup.ranks == 1 else costs.sync_s


def pause_s(setup: Setup, costs: Constants) -> float:
    """Return of a sync's fixed seconds those for which generation is paused."""
    return costs.alone_pause_s if setup.ranks == 1 else costs.pause_s


def busy_cores(setup: Setup, costs: Constants) -> float:
    """Return seconds that the cores of the busier host need for a part, if none is ever idle."""
    sender = sender_cpu(setup, costs)
    engine = receive_cpu(setup, costs) + setup.ranks * rank_cpu(setup, costs)
    cores = trainer_cores(setup, costs)
    if setup.one_host:
        return (sender + engine) / cores
    return max(sender / cores, engine / setup.engine_cores)


def part_times(setup: Setup, costs: Constants) -> dict[str, float]:
    """Return the wall seconds per part in each stage, if the stage has the machine to itself.

    A post's bytes are sent and received at the same time, on one connection; the parts that are in
    flight share the link and the engine's HTTP processes, each of which is one thread.
    """
    cores = trainer_cores(setup, costs)
    encoders = min(setup.trainer_hosts * setup.encoders, cores)
    return {
        "diff": diff_cpu(setup, costs) / cores,
        "tensors": tensors_cpu(setup, costs) / setup.trainer_hosts,
        "encode": encode_cpu(setup, costs) / encoders,
        "send": send_cpu(setup, costs) / min(setup.engines * setup.trainer_hosts, cores),
        "link": link(setup, costs),
        "receive": receive_cpu(setup, costs) / setup.http_processes,
        "stage": staging(setup, costs),
    }


@dataclass(frozen=True)
class Followed:
    """What the model says of engines that take a version from a delta log.

    Attributes:
        published_s: wall seconds until the version is in the log.
        followed_s: from then until an engine that looks at once has committed it.
        egress_bytes: from the trainer.
    """

    published_s: float
    followed_s: float
    egress_bytes: float


def follow(setup: Setup, costs: Constants) -> Followed:
    """Predict one version that a trainer writes into a log once, and any number of engines read.

    The log's storage gives every host the rate of its link. Publishing is a pipeline of comparing,
    encoding and writing; following one of reading, receiving (the copy to the spool) and staging.
    """
    one = replace(setup, engines=1)
    times = part_times(one, costs)
    share = one.first_share
    more = one.parts - share
    publish = [times[name] for name in ("diff", "tensors", "encode", "link")]
    receive = receive_cpu(one, costs)  # in the HTTP process that follows
    published = share * sum(publish) + more * max(publish)
    first = share * (times["link"] + receive + staging_alone(one, costs))
    further = more * max(times["link"], receive, times["stage"])
    followed = first + further + sync_s(one, costs) + commit(one, costs)
    return Followed(published, followed, part_bytes(one, costs) * one.parts)


def predict(setup: Setup, costs: Constants) -> Prediction:
    """Predict one sync.

    The time of one more part is the greatest of: each stage; all CPU work of a host, over its
    cores; and a post from its first byte to its answer, over the posts that may be in flight. So
    one post in flight gives the serial formula: of posting and staging part after part. On one host
    they wait for each other besides, as a sync of several parts was measured to.
    """
    times = part_times(setup, costs)
    transfer = max(times["send"], times["link"], receive_cpu(setup, costs))
    post = transfer + staging_alone(setup, costs) + part_s(setup, costs)
    # Nothing waits in a loop before the first post. One part is encoded by two threads.
    awake = trainer_cores(replace(setup, waiting=0), costs)
    first = diff_cpu(setup, costs) / awake + times["tensors"]
    first += encode_cpu(setup, costs) / min(2, awake) + post
    first *= setup.first_share
    bounds = {
        **times,
        "cores": busy_cores(setup, costs),
        "posts": post / (setup.posts_in_flight * setup.trainer_hosts),
    }
    bound = max(bounds, key=lambda name: bounds[name])
    step = bounds[bound]
    further = (setup.parts - setup.first_share) * step
    if setup.one_host:
        further /= costs.one_host_speed
    parts = first + further
    if setup.parts > 1:
        parts += max(0.0, post - step)  # of the last part, which is not overlapped
    paused = commit(setup, costs)
    refresh = refresh_cpu(setup, costs) / trainer_cores(setup, costs)
    whole = {name: seconds * setup.parts for name, seconds in times.items()}
    return Prediction(
        stages={**whole, "commit": paused, "refresh": refresh},
        bound=bound,
        seconds=sync_s(setup, costs) + parts + paused + refresh,
        further_s=further,
        pause_s=pause_s(setup, costs) + paused,
        wire_bytes=part_bytes(setup, costs) * setup.parts,
        cpu={
            "sender": sender_cpu(setup, costs) * setup.parts + refresh_cpu(setup, costs),
            "server": receive_cpu(setup, costs) * setup.parts,
            "rank": rank_cpu(setup, costs) * setup.parts,
        },
    )
