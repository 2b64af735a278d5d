"""vLLM's weight-transfer API in its front end: parts for the delta service.

vLLM's routes call methods of the engine client, which call every worker. With the backend
`delta_updates` these methods are replaced by ones that hand parts to the service, so that an update
is staged, voted on, committed, published and recorded as a posted one. The routes themselves exist
only with ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from engine_ext.adapters.vllm.engine import VllmEngine
from engine_ext.adapters.vllm.transfer_group import JoinGroup, LeaveGroup, ReceivePart, Transfer
from engine_ext.errors import DeltaError, MalformedPart, NotUpdatable, UploadTooSlow, as_delta_error
from engine_ext.ranks.operations import PartProgress
from engine_ext.structs import prepare

NAME: Final = "delta_updates"
PATHS: Final = (
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
_TARGET: Final = ("engine_ext.adapters.vllm.transfer_backend", "DeltaTransferEngine")
_MIN_POLL_S: Final = 0.001
_MAX_POLL_S: Final = 0.05
_SLACK_S: Final = 30.0

_T = TypeVar("_T")


def is_chosen(config: Any) -> bool:
    """Return whether vLLM's ``WeightTransferConfig``, or None without one, names this backend."""
    return bool(getattr(config, "backend", None) == NAME)


@functools.cache
def register_backend() -> None:
    """Register the backend in this process, once.

    Raises:
        ValueError: another package has registered the name.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(NAME, *_TARGET)


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer's arguments, given once: none, or the address of its collective's rendezvous."""

    master_address: str | None = None
    master_port: int | None = None
    backend: str = "gloo"
    timeout: float = 300.0  # limit of each wait for the trainer, in seconds


prepare(InitInfo)


def install(client: Any, service: Any, engine: VllmEngine) -> Any:
    """Replace a client's methods of the API; return the `WeightTransfer` of the service.

    Raises:
        RuntimeError: several HTTP processes serve the engine. The server does not start.
    """
    from delta_server.sources.transfer import WeightTransfer

    if engine.shared:
        raise RuntimeError(
            f"the weight-transfer backend {NAME} needs --api-server-count 1: the calls of one "
            "update must reach one process"
        )

    limit_s = InitInfo().timeout

    async def receive(path: Path, size: int) -> None:
        await _carry_out(engine, ReceivePart(path=str(path), size=size), limit_s)

    transfer = WeightTransfer(service.inlet, receive)

    async def init_weight_transfer_engine(request: Any) -> None:
        try:
            info = msgspec.convert(request.init_info, InitInfo)
        except msgspec.ValidationError as error:
            raise MalformedPart(f"bad init_info: {error}") from error
        if info.master_address is None and info.master_port is None:
            return
        if info.master_address is None or info.master_port is None:
            raise MalformedPart("init_info needs both of master_address and master_port")
        if info.backend not in ("gloo", "nccl") or not 0 < info.timeout <= 86400:
            raise MalformedPart("init_info needs gloo or nccl as backend, and a timeout in seconds")
        nonlocal limit_s
        limit_s = info.timeout
        await _carry_out(engine, JoinGroup(**msgspec.structs.asdict(info)), info.timeout)

    async def shutdown_weight_transfer_engine() -> None:
        await _call(engine, Transfer(step=LeaveGroup()))

    async def start_weight_update() -> None:
        await transfer.start()

    async def start_draft_weight_update() -> None:
        raise NotUpdatable("parts update the draft model too; call start_weight_update")

    async def update_weights(request: Any) -> None:
        try:
            await transfer.update(request.update_info)
        except Exception:
            # A trainer whose broadcast nobody takes notices when the other member leaves.
            with contextlib.suppress(Exception):
                await _call(engine, Transfer(step=LeaveGroup()))
            raise

    async def finish_weight_update(weight_version: str | None = None) -> None:
        await transfer.finish(weight_version)

    for method in (
        init_weight_transfer_engine,
        shutdown_weight_transfer_engine,
        start_weight_update,
        start_draft_weight_update,
        update_weights,
        finish_weight_update,
    ):
        setattr(client, method.__name__, _completing(method))
    return transfer


def _completing(method: Callable[..., Awaitable[_T]]) -> Callable[..., Awaitable[_T]]:
    """Complete a call even if its caller goes away; all that it raises is a `DeltaError`."""

    @functools.wraps(method)
    async def complete(*args: Any, **kwargs: Any) -> _T:
        try:
            return await asyncio.shield(asyncio.ensure_future(method(*args, **kwargs)))
        except Exception as error:
            raise as_delta_error(error) from error

    return complete


async def _carry_out(engine: VllmEngine, step: JoinGroup | ReceivePart, limit_s: float) -> None:
    """Begin something on the worker that receives, and wait until it has ended.

    Raises:
        UploadTooSlow: it has not ended some time after the limit that the group has itself, which
            does not cover all that a backend does. The worker still waits for its trainer, and
            refuses other transfers until that ends.
    """
    request = Transfer(step=step)
    wait, end = _MIN_POLL_S, time.monotonic() + limit_s + _SLACK_S
    while not all(reply.done for reply in await _call(engine, request)):
        request = Transfer()
        if time.monotonic() > end:
            raise UploadTooSlow(f"the trainer's collective took longer than {limit_s:g} s")
        await asyncio.sleep(wait)
        wait = min(2 * wait, _MAX_POLL_S)


async def _call(engine: VllmEngine, request: Transfer) -> list[PartProgress]:
    replies: list[PartProgress] = []
    for answer in await engine.call(request, method="delta_transfer"):
        if isinstance(answer, DeltaError):
            raise answer
        replies.append(answer)
    return replies
