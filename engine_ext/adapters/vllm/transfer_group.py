"""A worker's side of a collective that a trainer sends parts over: a group of two.

The trainer is its rank 0, one worker of the engine its rank 1. Joining and receiving wait for the
trainer, so they run in a thread of their own while the worker generates.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from engine_ext.errors import Conflict, SpoolFull, UploadTooSlow
from engine_ext.kernels import same_device
from engine_ext.ranks.operations import (
    Operation,
    PartProgress,
    decode_request,
    encode_answer,
)
from engine_ext.structs import prepare

TRAINER, WORKER = 0, 1
_POLL_S = 0.001
_WATCHDOG_SLACK_S = 300.0
ANNOUNCED = "worker"  # the key that the worker sets before it makes its group


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Join the trainer's group; one that was joined before is left."""

    master_address: str
    master_port: int
    backend: str  # gloo or nccl
    timeout: float  # limit of each wait for the trainer, in seconds


class ReceivePart(msgspec.Struct, frozen=True, kw_only=True, tag="receive"):
    """Receive `size` bytes into a new file."""

    path: str
    size: int


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave"):
    """Leave the group, once what was begun has ended."""


class Transfer(Operation[PartProgress], frozen=True, kw_only=True, tag="transfer"):
    """Begin a step, or none, and ask whether what was begun last has ended; raises its error."""

    step: JoinGroup | ReceivePart | LeaveGroup | None = None


prepare(Transfer)


class TransferGroup:
    """The group as one worker sees it; workers other than `receives` answer and do nothing else."""

    def __init__(self, device: torch.device, *, receives: bool) -> None:
        self._device, self._receives = device, receives
        self._begun: Future[None] | None = None
        self._group: Any = None
        self._is_nccl, self._limit_s = False, 0.0

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out a `Transfer`; never raises."""
        return encode_answer(
            lambda: self._carry_out(decode_request(operation, arguments, Transfer))
        )

    def close(self) -> None:
        """Leave the group, once what was begun has ended."""
        self._after(self._begun, self._leave)

    def _carry_out(self, request: Transfer) -> PartProgress:
        step = request.step
        if isinstance(step, LeaveGroup):
            self.close()
            return PartProgress(done=True)
        if step is not None and self._receives:
            self._begin(step)
        return PartProgress(done=self._poll())

    def _begin(self, step: JoinGroup | ReceivePart) -> None:
        if self._begun is not None and not self._begun.done():
            raise Conflict("an earlier transfer still waits for its trainer; try again later")
        if isinstance(step, JoinGroup):
            self._begun = self._after(None, lambda: self._join(step))
        else:
            self._begun = self._after(None, lambda: self._receive(step))

    def _after(self, earlier: Future[None] | None, work: Callable[[], None]) -> Future[None]:
        """Begin something once another has ended; a worker that exits does not wait for it."""
        ended: Future[None] = Future()
        use_device = same_device()

        def run() -> None:
            use_device()
            if earlier is not None:
                wait([earlier])
            try:
                work()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        threading.Thread(target=run, name="delta-transfer", daemon=True).start()
        return ended

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
            self._group = join_group(request, self._device)
        except Exception as error:
            raise Conflict(f"the trainer's group could not be joined: {error}") from error
        self._is_nccl, self._limit_s = request.backend == "nccl", request.timeout

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
            work = broadcast(self._group, received)
            if self._is_nccl:
                wait_on_device(self._group, work, self._limit_s)
                part.copy_(received)
            else:
                work.wait()
        except Exception as error:
            self._leave()
            raise UploadTooSlow(
                f"the part did not arrive over the collective: {error}; call "
                "init_weight_transfer_engine again"
            ) from error

    def _leave(self) -> None:
        self._group = None


def join_group(request: JoinGroup, device: torch.device) -> Any:
    """Return a group of two, outside of torch's default one; waits for the trainer.

    `delta_sender.integrations.transfer_group` has the trainer's half. It makes its group once
    this one is announced; the first all-reduce makes the connections, NCCL's among them, so that
    later only the trainer's bytes are waited for.
    """
    limit = timedelta(seconds=request.timeout)
    store: Any = dist.TCPStore(
        request.master_address, request.master_port, 2, False, limit, wait_for_workers=False
    )
    shared = dist.PrefixStore("delta-transfer", store)
    shared.set(ANNOUNCED, "")
    group: Any
    if request.backend == "gloo":
        group, device = dist.ProcessGroupGloo(shared, WORKER, 2, limit), torch.device("cpu")
    else:
        options = dist.ProcessGroupNCCL.Options()
        # When this is over, NCCL's watchdog ends the whole process.
        options._timeout = limit + timedelta(seconds=_WATCHDOG_SLACK_S)
        group = dist.ProcessGroupNCCL(shared, WORKER, 2, options)
    members = torch.ones(1, dtype=torch.int32, device=device)
    work = group.allreduce([members], dist.AllreduceOptions())
    if request.backend == "gloo":
        work.wait()
    else:
        wait_on_device(group, work, request.timeout)
    if members.item() != 2:
        raise RuntimeError("the trainer's group has another member")
    return group


def wait_on_device(group: Any, work: Any, limit_s: float) -> None:
    """Wait until NCCL has ended something: its own `wait` makes only the current stream wait.

    Raises:
        TimeoutError: it has not ended within the limit. The group is aborted.
    """
    end = time.monotonic() + limit_s
    while not work.is_completed():
        if time.monotonic() > end:
            group.abort()
            raise TimeoutError(f"it took longer than {limit_s:g} s")
        time.sleep(_POLL_S)
    work.wait()  # raises what has gone wrong


def broadcast(group: Any, tensor: torch.Tensor) -> Any:
    """Begin to send the trainer's bytes to the worker; return the work to wait for."""
    options = dist.BroadcastOptions()
    options.rootRank = TRAINER
    return group.broadcast([tensor], options)
