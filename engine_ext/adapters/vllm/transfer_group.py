"""A worker's side of a collective that a trainer sends parts over: a group of two.

The trainer is its rank 0, one worker of the engine its rank 1. Joining and receiving wait for the
trainer, so they run in a thread of their own and the worker goes on generating.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Union

import torch
import torch.distributed as dist

from engine_ext.errors import Conflict, SpoolFull, UploadTooSlow
from engine_ext.wire.operations import (
    Operation,
    PartProgress,
    Reply,
    decode_request,
    encode_answer,
)

TRAINER, WORKER = 0, 1


class JoinGroup(Operation[Reply], frozen=True, kw_only=True, tag="join_group"):
    """Begin to join the trainer's group; one that was joined before is left."""

    master_address: str
    master_port: int
    backend: str  # gloo or nccl
    timeout: float  # seconds that the trainer may need for anything


class ReceivePart(Operation[Reply], frozen=True, kw_only=True, tag="receive_part"):
    """Begin to receive `size` bytes into a new file."""

    path: str
    size: int


class PollGroup(Operation[PartProgress], frozen=True, tag="poll_group"):
    """Ask whether what was begun last has ended; answers with its error."""


class LeaveGroup(Operation[Reply], frozen=True, tag="leave_group"):
    """Leave the group."""


_Request: Any = Union[JoinGroup, ReceivePart, PollGroup, LeaveGroup]  # noqa: UP007


class TransferGroup:
    """The group as one worker sees it; workers other than `receives` answer and do nothing else."""

    def __init__(self, device: torch.device, *, receives: bool) -> None:
        self._device, self._receives = device, receives
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="delta-transfer")
        self._begun: Future[None] | None = None
        self._group: Any = None
        self._is_nccl = False

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation of this module; never raises."""
        return encode_answer(
            lambda: self._carry_out(decode_request(operation, arguments, _Request))
        )

    def close(self) -> None:
        """Leave the group, once what was begun has ended."""
        self._thread.submit(self._leave)

    def _carry_out(self, request: Any) -> Reply:
        if isinstance(request, PollGroup):
            return PartProgress(done=self._poll())
        if isinstance(request, LeaveGroup):
            self.close()
        elif self._receives:
            if self._begun is not None and not self._begun.done():
                raise Conflict("an earlier transfer still waits for its trainer; try again later")
            work = self._join if isinstance(request, JoinGroup) else self._receive
            self._begun = self._thread.submit(work, request)
        return Reply()

    def _poll(self) -> bool:
        if self._begun is None:
            return True
        if not self._begun.done():
            return False
        self._begun.result()
        return True

    def _join(self, request: JoinGroup) -> None:
        self._leave()
        try:
            self._group = join_group(
                request.master_address,
                request.master_port,
                WORKER,
                request.backend,
                request.timeout,
            )
        except Exception as error:
            raise Conflict(f"the trainer's group could not be joined: {error}") from error
        self._is_nccl = request.backend == "nccl"

    def _receive(self, request: ReceivePart) -> None:
        if self._group is None:
            raise Conflict("no group was joined; call init_weight_transfer_engine with its address")
        try:
            with open(request.path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, request.size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise SpoolFull("the spool folder has no room for the part") from error
        # Gloo writes into the file's pages.
        part = torch.from_file(request.path, shared=True, size=request.size, dtype=torch.uint8)
        received = torch.empty_like(part, device=self._device) if self._is_nccl else part
        try:
            broadcast(self._group, received).wait()
            if self._is_nccl:
                part.copy_(received)
        except Exception as error:
            self._leave()
            raise UploadTooSlow(
                f"the part did not arrive over the collective: {error}; call "
                "init_weight_transfer_engine again"
            ) from error

    def _leave(self) -> None:
        self._group = None


def join_group(address: str, port: int, rank: int, backend: str, timeout: float) -> Any:
    """Return a group of two, outside of torch's default one; waits for the other member.

    `delta_sender.integrations.vllm_transfer` has the trainer's half.
    """
    limit = timedelta(seconds=timeout)
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, 2, rank == TRAINER, limit, wait_for_workers=False
    )
    shared = dist.PrefixStore("delta-transfer", store)  # type: ignore[attr-defined]
    if backend == "gloo":
        return dist.ProcessGroupGloo(shared, rank, 2, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(shared, rank, 2, options)


def broadcast(group: Any, tensor: torch.Tensor) -> Any:
    """Begin to send the trainer's bytes to the worker; return the work to wait for."""
    options = dist.BroadcastOptions()
    options.rootRank = TRAINER
    return group.broadcast([tensor], options)
