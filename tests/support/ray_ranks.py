"""An engine whose ranks are Ray actors: real receivers of a toy model, and votes over gloo."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine_ext.conformance.toy_models import Checkpoint, ToyModel, parameter
from engine_ext.errors import DeltaError
from engine_ext.ranks import GroupRanks
from engine_ext.ranks.operations import Operation, ReplyT, decode_answers, encode_request
from engine_ext.remote_parts import locator
from engine_ext.settings import Settings
from engine_ext.startup import LoadedModel
from engine_ext.sync import make_receiver
from tests.support import in_process_engine
from tests.support.delta_bodies import SHAPES, Weights, fresh_weights
from tests.support.endpoint_rig import Rig
from tests.support.ray_nodes import Nodes
from tests.support.served_models import bits, load

RANKS = 4  # two on each host
_TIMEOUT_S = 240.0  # starting takes long on a busy machine
_VOTE_TIMEOUT_S = 20.0


def share_of(rank: int) -> type[ToyModel]:
    """Return the toy model of one rank, which holds an equal share of every tensor's elements."""

    class Share(ToyModel):
        shapes: ClassVar = SHAPES

        def build(self) -> None:
            for name, shape in self.shapes.items():
                begin, end = span(rank, shape)
                setattr(self, name.replace(".", "_"), parameter(end - begin))

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            begin, end = span(rank, self.shapes[name])
            getattr(self, name.replace(".", "_")).copy_(weight.reshape(-1)[begin:end])

    return Share


def span(rank: int, shape: tuple[int, ...]) -> tuple[int, int]:
    numel = int(np.prod(shape))
    return numel * rank // RANKS, numel * (rank + 1) // RANKS


def base_checkpoint() -> Checkpoint:
    return {
        name: torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).reshape(SHAPES[name])
        for name, values in fresh_weights().items()
    }


class MortalRanks(GroupRanks):
    """Ranks; this one can be made to die at one of its next votes, by its number; 0 is never."""

    dies_at = 0

    def all_gather(self, value: Any) -> list[Any]:
        self.dies_at -= 1
        if self.dies_at == 0:
            os._exit(1)
        return super().all_gather(value)


class Rank:
    """The process of one rank."""

    def __init__(self, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        # Ranks that exchange nothing with one that dies wait as long as this.
        self._group = dist.new_group(timeout=timedelta(seconds=_VOTE_TIMEOUT_S))

    def load(self, settings: bytes) -> None:
        """Load the model, and make its receiver; all ranks must be called."""
        chosen, base = msgspec.json.decode(settings, type=Settings), base_checkpoint()
        self._model = load(share_of(self._rank), base)
        self._ranks = MortalRanks(self._group)
        loaded = LoadedModel(
            model=self._model,
            load_weights=self._model.load_weights,
            checkpoint=lambda: iter(base.items()),
            reload=self._model.load_weights,
            ranks=self._ranks,
            constants=lambda path, tensor: True,
            locate=locator(chosen, several_hosts=True),
        )
        self._receiver = make_receiver(loaded, chosen)

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._receiver.handle(operation, arguments)

    def bits(self) -> Weights:
        return {name: bits(getattr(self._model, name.replace(".", "_"))) for name in SHAPES}

    def die_at_vote(self, number: int) -> None:
        self._ranks.dies_at = number

    def write_file(self, path: str, content: bytes) -> None:
        """Write a file on this rank's host."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)


class RankProcesses:
    """The processes of all ranks: for one engine after the other, until one has died.

    Args:
        nodes: of the cluster that this process is a driver of.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.actors: list[Any] = []

    def start(self) -> None:
        if self.actors:
            return
        hosts = [self.nodes.first.host.address, self.nodes.second.host.address]
        ids = {one["NodeManagerAddress"]: one["NodeID"] for one in ray.nodes() if one["Alive"]}
        with socket.create_server((hosts[0], 0)) as probe:
            store = f"tcp://{hosts[0]}:{probe.getsockname()[1]}"
        for rank in range(RANKS):
            on = NodeAffinitySchedulingStrategy(ids[hosts[rank * len(hosts) // RANKS]], soft=False)
            actor = ray.remote(num_cpus=0, scheduling_strategy=on)(Rank).remote(rank, store)
            self.actors.append(actor)

    def stop(self) -> None:
        while self.actors:
            ray.kill(self.actors.pop())


class RayEngine(in_process_engine.Engine):
    """Calls its ranks as vLLM calls its workers: all at once, and answers come in rank order."""

    def __init__(self, settings: Settings, processes: RankProcesses) -> None:
        processes.start()
        self.actors = list(processes.actors)
        self.address = processes.nodes.first.host.address
        # A host's cache is where its ranks find the temporary folder.
        sent = msgspec.json.encode(msgspec.structs.replace(settings, cache_dir=None))
        ray.get([actor.load.remote(sent) for actor in self.actors], timeout=_TIMEOUT_S)
        self.events: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.paused, self.weight_version = False, "default"

    def close(self) -> None:
        """The processes are used again."""

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        sent = encode_request(request)
        answers = await asyncio.gather(*(actor.handle.remote(*sent) for actor in self.actors))
        return decode_answers(request, answers)

    def bits_of(self, ranks: range) -> list[Weights]:
        """The live bits of some ranks."""
        found: list[Weights] = ray.get([self.actors[rank].bits.remote() for rank in ranks])
        return found

    @property
    def weights(self) -> Weights:
        """The live bits of every tensor, from all ranks."""
        shares = self.bits_of(range(RANKS))
        return {name: np.concatenate([share[name] for share in shares]) for name in SHAPES}


class RayRig(Rig):
    """The endpoints over such an engine; the server is this process, on the first host."""

    engine: RayEngine

    def __init__(self, processes: RankProcesses, spool_dir: Path, **settings: Any) -> None:
        self._processes = processes
        super().__init__(spool_dir, **settings)

    def make_engine(self) -> RayEngine:
        return RayEngine(self.settings, self._processes)

    def run(self, work: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout_s))
