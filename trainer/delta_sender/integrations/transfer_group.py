"""The trainer's side of a collective that parts are sent over: a group of two.

The trainer is its rank 0, one worker of the engine its rank 1;
`engine_ext.adapters.vllm.transfer_group` has the worker's half.
"""

from __future__ import annotations

import time
from concurrent import futures
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

_TRAINER: Final = 0
_ANNOUNCED: Final = "worker"  # the key that the worker sets before it makes its group
_POLL_S: Final = 0.002
_NO_ANSWER: Final = "the engine has not answered within the channel's timeout"
_LATER_S: Final = 1.0  # than the group's own limit, which ends its work


class Rendezvous:
    """A free port where the worker is waited for.

    Args:
        address: This host's, as the engine reaches it.
        backend: ``gloo`` or ``nccl``.
        timeout: Seconds that either side waits for the other.
    """

    def __init__(self, address: str, backend: str, timeout: float) -> None:
        self._backend, self._limit = backend, timedelta(seconds=timeout)
        self._store: Any = dist.TCPStore(address, 0, 2, True, self._limit, wait_for_workers=False)
        self.info = {
            "master_address": address,
            "master_port": self._store.port,
            "backend": backend,
            "timeout": timeout,
        }

    def meet(self, answer: futures.Future[None], device: torch.device | None, end: float) -> Group:
        """Return the group once the worker is there and both have heard from each other.

        Args:
            answer: The engine's to the call that makes its worker join. If it refuses, or ends
                without a worker, that is waited for no longer.
            device: The GPU that NCCL uses here.
            end: Until when the worker and the answer are waited for, by `time.monotonic`.

        Raises:
            SyncError: The engine refused.
            TimeoutError: No worker came, or no answer.
            RuntimeError: The two could not be connected.
        """
        shared = dist.PrefixStore("delta-transfer", self._store)
        while not shared.check([_ANNOUNCED]):
            if answer.done():
                answer.result()
                raise RuntimeError("the engine has answered, but none of its workers has joined")
            if time.monotonic() > end:
                raise TimeoutError(f"no worker of the engine came within {self._limit}")
            time.sleep(_POLL_S)
        group: Any
        if self._backend == "gloo":
            group = dist.ProcessGroupGloo(shared, _TRAINER, 2, self._limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            group = dist.ProcessGroupNCCL(shared, _TRAINER, 2, options)
        members = torch.ones(1, dtype=torch.int32, device=device)
        work = group.allreduce([members], dist.AllreduceOptions())
        _wait_for_either(answer, work, end)
        if answer.done():
            answer.result()
        work.wait()
        if members.item() != 2:  # on a GPU, the first thing that waits for the other member
            raise RuntimeError("the group has another member than the engine's worker")
        _result(answer, end)
        return Group(group, device)


class Group:
    """The group of two, once both are there."""

    def __init__(self, group: Any, device: torch.device | None) -> None:
        self._group, self._device = group, device

    def broadcast(self, part: torch.Tensor, answer: futures.Future[None], end: float) -> None:
        """Send bytes to the worker; the group cannot be used again after an error.

        Args:
            answer: The engine's to the call that makes its worker receive.
            end: Until when the answer is waited for, by `time.monotonic`.

        Raises:
            SyncError: The engine refused; if it did so before it received, nobody ever takes the
                bytes, and they are not waited for.
            TimeoutError: No answer came.
            RuntimeError: The worker is gone.
        """
        work = self._group.broadcast([part.to(self._device)], dist.BroadcastOptions())
        try:
            _wait_for_either(answer, work, end)
            _result(answer, end)
        except Exception:
            if self._device is not None:  # NCCL's kernel waits for its other end, however it ends
                self._group.abort()
            raise
        work.wait()


def _wait_for_either(answer: futures.Future[None], work: Any, end: float) -> None:
    while not answer.done() and not work.is_completed():
        if time.monotonic() > end + _LATER_S:
            raise TimeoutError(_NO_ANSWER)
        time.sleep(_POLL_S)


def _result(answer: futures.Future[None], end: float) -> None:
    try:
        answer.result(max(0.0, end - time.monotonic()))
    except futures.TimeoutError as error:  # in Python 3.10 not the builtin one
        raise TimeoutError(_NO_ANSWER) from error
