"""Ranks in a Ray cluster of two hosts: how parts reach them, and what their failures leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import xxhash
from starlette.requests import Request
from starlette.responses import Response

from delta_server.part_server import PartServer
from engine_ext.conformance.verified_file import verified_file
from engine_ext.log import Objects
from tests.support.delta_bodies import (
    NEXT,
    OTHER_STEP,
    STEP,
    VERSION,
    Changes,
    Weights,
    after,
    delta_part,
    fresh_weights,
    full_part,
    same,
)
from tests.support.endpoint_rig import assert_error
from tests.support.ray_nodes import Nodes, two_nodes
from tests.support.ray_ranks import RANKS, RankProcesses, RayRig

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

ENCODINGS = ("gap8_exp", "deltas", "indices")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        ray.init(address=nodes.address, _node_ip_address=nodes.first.host.address)
        yield RankProcesses(nodes)
        ray.shutdown()


@pytest.fixture
def nodes(processes: RankProcesses) -> Nodes:
    return processes.nodes


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in the first host's shared memory, which the second host does not see."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def rig(processes: RankProcesses, memory: Path) -> Iterator[RayRig]:
    with running(processes, memory) as rig:
        yield rig


@pytest.fixture
def mortal(processes: RankProcesses, rig: RayRig) -> Iterator[RayRig]:
    """A rig that loses a rank."""
    yield rig
    processes.stop()


@contextlib.contextmanager
def running(processes: RankProcesses, memory: Path, **settings: Any) -> Iterator[RayRig]:
    for node in (processes.nodes.first, processes.nodes.second):
        shutil.rmtree(cache_of(node), ignore_errors=True)
    rig = RayRig(processes, memory / "spool", cache_dir=str(memory / "cache"), **settings)
    yield rig
    server = rig.service._part_server
    assert server is not None
    server.close()
    rig.close()


def cache_of(node: Any) -> Path:
    return node.temporary / f"delta-updates-cache-{os.geteuid()}"


def content(body: bytes) -> str:
    """The name of what hosts get of a part: its file in the spool."""
    return xxhash.xxh3_128_hexdigest(verified_file(body)[1])


def fetched_on(node: Any) -> set[str]:
    return {path.stem for path in cache_of(node).glob("*.part")}


def changes(version: int) -> Changes:
    """One element of every tensor, each on another rank."""
    return {
        name: {(5 * version + 7 * number) % values.size: version + 1}
        for number, (name, values) in enumerate(fresh_weights().items())
    }


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the first host has served each part, by its content."""
    counts, serve = Counter[str](), PartServer._serve

    async def counting(server: PartServer, request: Request) -> Response:
        counts[request.path_params["name"].partition("-")[0]] += 1
        return await serve(server, request)

    monkeypatch.setattr(PartServer, "_serve", counting)
    return counts


def test_each_part_is_fetched_once_per_host(
    served: Counter[str], nodes: Nodes, rig: RayRig
) -> None:
    weights, sent = fresh_weights(), list[bytes]()
    for version, encoding in enumerate(ENCODINGS, VERSION + 1):
        step = changes(version)
        parts = [
            delta_part(
                {name: step[name]},
                version,
                encoding=encoding,
                sync_id=encoding,
                part=number,
                num_parts=len(step),
            )
            for number, name in enumerate(step)
        ]
        answers = [rig.send(part) for part in parts]
        weights = after(weights, step)
        assert [answer.json()["status"] for answer in answers[:-1]] == ["staged"] * 2
        rig.assert_committed(answers[-1], weights, version)
        sent += parts
    assert rig.status().ranks == RANKS
    assert rig.status().version.digest == rig.digest_of(weights)
    contents = set(map(content, sent))
    assert served == dict.fromkeys(contents, 1)
    assert fetched_on(nodes.second) == contents
    assert fetched_on(nodes.first) == set()

    version = rig.status().version.number
    rig.assert_committed(
        rig.send(full_part(NEXT, version + 1)),
        NEXT,
        version + 1,
    )
    assert rig.post("/delta_rollback").status_code == 200
    assert same(rig.engine.weights, weights)


def test_an_object_of_a_store(
    served: Counter[str], processes: RankProcesses, memory: Path, store_url: str
) -> None:
    body = delta_part()
    Objects(store_url).put("step/part.safetensors", body)
    with running(processes, memory, roots=(store_url,)) as rig:
        rig.assert_committed(rig.disk(f"{store_url}/step", "part.safetensors"), NEXT, VERSION + 1)
        assert served == {content(body): 1}
        assert fetched_on(processes.nodes.second) == set(served)


def test_a_file_of_another_host_at_the_same_path(processes: RankProcesses, memory: Path) -> None:
    """It would be a part of the same sync, with other values."""
    path = memory / "published" / "part.safetensors"
    path.parent.mkdir()
    path.write_bytes(delta_part(STEP, sync_id="one"))
    with running(processes, memory, roots=(str(path.parent),)) as rig:
        others = {name: dict.fromkeys(at, 0x2222) for name, at in STEP.items()}
        other = delta_part(others, sync_id="one")
        assert len(other) == path.stat().st_size
        ray.get(rig.engine.actors[-1].write_file.remote(str(path), other))
        rig.assert_committed(rig.disk(path.parent, path.name), NEXT, VERSION + 1)


def refused(rig: RayRig, answer: httpx.Response, status: int, kind: str) -> None:
    """Nothing has been written on any rank, and the next sync commits."""
    assert_error(answer, status, kind)
    assert same(rig.engine.weights, fresh_weights())
    assert rig.status().version.by_rank == [VERSION] * RANKS
    rig.assert_committed(
        rig.send(delta_part(OTHER_STEP, sync_id="next")),
        after(fresh_weights(), OTHER_STEP),
        VERSION + 1,
    )


@pytest.mark.parametrize(
    ("answered", "status", "kind"),
    [(404, 502, "PartUnavailable"), (401, 502, "PartUnavailable"), (200, 502, "PartUnavailable")],
)
def test_a_host_that_does_not_get_a_part(
    processes: RankProcesses,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    answered: int,
    status: int,
    kind: str,
) -> None:
    """Its ranks refuse the sync, also if they get another part of the same size."""
    body, serve = delta_part(), PartServer._serve
    size = len(verified_file(body)[1])
    other = verified_file(delta_part(OTHER_STEP, sync_id="another"))[1]
    answers = [Response(bytes(other)[:size].ljust(size), status_code=answered)]

    async def serve_another(server: PartServer, request: Request) -> Response:
        return answers.pop() if answers else await serve(server, request)

    monkeypatch.setattr(PartServer, "_serve", serve_another)
    with running(processes, memory) as rig:
        refused(rig, rig.send(body), status, kind)


def survivors(rig: RayRig) -> list[Weights]:
    return rig.engine.bits_of(range(RANKS - 1))


def parts(count: int) -> list[bytes]:
    return [
        delta_part({name: at}, sync_id="one", part=number, num_parts=count)
        for number, (name, at) in enumerate(STEP.items())
    ]


def test_a_rank_that_dies_between_stage_and_commit(mortal: RayRig) -> None:
    before, (first, second) = survivors(mortal), parts(2)
    assert mortal.send(first).json()["status"] == "staged"
    ray.kill(mortal.engine.actors[-1])
    assert mortal.send(second).status_code == 500
    assert all(map(same, before, survivors(mortal)))


@pytest.mark.parametrize("vote", [1, 2])
def test_a_rank_that_dies_at_a_vote(mortal: RayRig, vote: int) -> None:
    """The others do not hear it, and take back what they might have written."""
    before, (first, second) = survivors(mortal), parts(2)
    assert mortal.send(first).json()["status"] == "staged"
    ray.get(mortal.engine.actors[-1].die_at_vote.remote(vote))
    assert mortal.send(second).status_code == 500
    assert all(map(same, before, survivors(mortal)))
