"""The endpoints over two ranks that serve a model as a real engine does, and the ranks' faults."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch

from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.service import DeltaService
from delta_server.sources import deliver
from delta_server.sources.push import SinglePart
from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.errors import DeltaError, as_delta_error
from engine_ext.ranks.operations import Operation, ReplyT
from engine_ext.sync.staged import StagedPart, UndoLog
from tests.support.endpoint_rig import COMPLETIONS, DELTA, Rig, app_of
from tests.support.in_process_engine import Engine
from tests.support.quantised_engine import Serving, loaded, served
from tests.support.staged_writes import writes_of
from tests.support.toy_quantised import Model

RANKS = 2


class FaultyApplier:
    """A rank's own applier, whose next steps can be made to fail.

    Attributes:
        refuses: what staging raises.
        writes: after how many writes of a commit or rollback the rank fails; None never fails.
        undoes: whether what was written can be taken back.
        rolls_back: whether a rollback works.
    """

    def __init__(self, applier: Any) -> None:
        self._applier = applier
        self.heal()

    def heal(self) -> None:
        self.refuses: Exception | None = None
        self.writes: int | None = None
        self.undoes = self.rolls_back = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._applier, name)

    def stage(self, part: Any) -> StagedPart:
        if self.refuses is not None:
            raise self.refuses
        staged: StagedPart = self._applier.stage(part)
        return staged

    def stage_unpacked(self, part: Any) -> StagedPart:
        if self.refuses is not None:
            raise self.refuses
        staged: StagedPart = self._applier.stage_unpacked(part)
        return staged

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        if self.writes is None:
            self._applier.write(staged, given_up)
            return
        own = writes_of(*staged)
        compares = self._applier.compares_while_writing(staged)
        for one in own[: self.writes]:
            one.put(compares)
        raise OSError("nothing can be written any more")

    def undo(self, staged: Sequence[StagedPart]) -> None:
        if not self.undoes:
            raise OSError("the old values are gone")
        self._applier.undo(staged)

    def roll_back(self, log: UndoLog) -> None:
        if not self.rolls_back:
            tabled = [pair for table in log.tables for pair in table.pairs]
            for elements, old in [*log.writes, *tabled][: self.writes]:
                elements.put(old)
            raise OSError("the old values are gone")
        self._applier.roll_back(log)


class ServedEngine(Engine):
    """An engine of two ranks that serve a model.

    Attributes:
        later: seconds by which the clock that the ranks are given is ahead.
    """

    shared = True

    def __init__(self, serving: Serving, settings: Any) -> None:
        super().__init__(settings, serving.engine.receivers)
        self.later = 0.0
        self.appliers = [FaultyApplier(serving.applier(rank)) for rank in range(RANKS)]
        for receiver, applier in zip(self.receivers, self.appliers, strict=True):
            receiver.adopt(applier)

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        if "now" in request.__struct_fields__:
            now = request.now + self.later  # type: ignore[attr-defined]
            request = msgspec.structs.replace(request, now=now)
        return await super().call(request)


class ServedRig(Rig):
    """An engine of two ranks that serve a model, with two HTTP processes."""

    def __init__(self, kind: type[Model], folder: Path, **settings: Any) -> None:
        ranks = folder / "ranks"
        ranks.mkdir()
        base = settings.get("base_version", 0)
        timeout = settings.get("stage_timeout", 60.0)
        self.serving = Serving(kind, ranks, ranks=RANKS, base_version=base, stage_timeout=timeout)
        super().__init__(folder / "spool", **{"base_version": 0, "max_body_bytes": 1 << 16})
        self.services = [self.service, DeltaService(self.engine, self.settings)]
        self.run(self.services[1].start())
        self.engine.events.clear()
        self.apps = [self.app, app_of(self.services[1])]

    @property
    def served_engine(self) -> ServedEngine:
        assert isinstance(self.engine, ServedEngine)
        return self.engine

    def make_engine(self) -> Engine:
        return ServedEngine(self.serving, self.settings)

    def close(self) -> None:
        self.services[1].intake.close()
        super().close()

    # By one of the two processes ---------------------------------------------------------------

    def ask(self, process: int, method: str, path: str, **options: Any) -> httpx.Response:
        return self.run(self.request(method, path, app=self.apps[process], **options))

    def send_to(self, process: int, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return self.ask(process, "POST", DELTA, content=body, headers=headers)

    def send_at_once(self, bodies: Sequence[bytes]) -> list[dict[str, Any]]:
        """The answers to parts that are sent at once, each to another process."""

        async def send(process: int, body: bytes) -> dict[str, Any]:
            headers = {"Content-Type": "application/octet-stream"}
            app = self.apps[process]
            response = await self.request("POST", DELTA, app=app, content=body, headers=headers)
            answer: dict[str, Any] = response.json()
            return answer

        async def send_all() -> list[dict[str, Any]]:
            return list(await asyncio.gather(*map(send, range(len(bodies)), bodies)))

        answers: list[dict[str, Any]] = self.run(send_all())
        return answers

    def replay(self, process: int, body: bytes) -> dict[str, Any]:
        """Apply a part as one of the delta log; its answer, or the error as JSON, as of a route."""
        service = self.services[process]
        record, options = RequestRecord(origin="log"), Options()
        read = asyncio.to_thread(service.intake.read, io.BytesIO(body))
        source = SinglePart(service.inlet, read, options, record)
        try:
            return self.run(deliver(source))
        except Exception as error:
            return {"error": as_delta_error(error).to_wire()}

    def generates(self, process: int) -> bool:
        """Whether generation is served; a paused engine keeps requests waiting, and serves."""
        return self.ask(process, "POST", COMPLETIONS).status_code == 200

    def generates_of(self, process: int, version: int) -> bool:
        """Whether a request for this version is answered."""
        headers = {"X-Weight-Version": str(version)}
        return self.ask(process, "POST", COMPLETIONS, headers=headers).status_code == 200

    # The ranks ---------------------------------------------------------------------------------

    def heal(self) -> None:
        for applier in self.served_engine.appliers:
            applier.heal()
        self.engine.fails.clear()
        self.engine.loses.clear()

    def memory(self) -> list[dict[str, Any]]:
        """All that each rank serves, to the bit."""
        return [served(model) for model in self.serving.models]

    def fresh_memory(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """All that each rank of an engine serves that has loaded this checkpoint."""
        kind = self.serving.kind
        return [served(loaded(kind, checkpoint, rank, RANKS)) for rank in range(RANKS)]

    def overwrite(self, by: str) -> None:
        """Let the engine change its weights itself, the unprocessed ones too, and report it."""
        self.uses += 1
        for receiver in self.engine.receivers:
            receiver.weights_replaced(by)
        kept = [one.before for states in self.serving.states for one in states.states]
        for module in (*self.serving.models, *kept):
            for tensor in module.parameters():
                tensor.data.zero_()

    def corrupt(self, rank: int, name: str) -> None:
        """Flip a bit of a rank's live parameter, which nobody reports."""
        self.uses += 1
        self.serving.models[rank].get_parameter(name).data.view(torch.int16)[0] ^= 1

    def fall_asleep(self) -> None:
        self.uses += 1
        for receiver in self.engine.receivers:
            receiver.weights_released()

    def wake_up(self) -> None:
        self.uses += 1
        self.engine.set_asleep(False)
