"""A worker that receives over NCCL, with a simulated group: a trainer can die at any time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.adapters.vllm import transfer_group
from engine_ext.adapters.vllm.transfer_group import JoinGroup, ReceivePart, Transfer, TransferGroup
from engine_ext.ranks.operations import encode_request

SIZE = 8
JOIN = JoinGroup(master_address="127.0.0.1", master_port=1, backend="nccl", timeout=0.2)


class Group:
    """NCCL's: a broadcast ends on the device only after a while, which `wait` does not wait for."""

    def __init__(self, arrives: bool) -> None:
        self.arrives, self.polls, self.aborted = arrives, 0, False
        self._received = torch.empty(0)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Group:
        [self._received] = tensors
        return self

    def is_completed(self) -> bool:
        self.polls += 1
        if self.arrives and self.polls == 3:
            self._received.fill_(7)
        return self.arrives and self.polls >= 3

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def carry_out(worker: TransferGroup, step: Any) -> dict[str, Any]:
    """The answer when the step has ended."""
    answer = worker.handle(*encode_request(Transfer(step=step)))
    while "ok" in answer and not answer["ok"]["done"]:
        time.sleep(0.01)
        answer = worker.handle(*encode_request(Transfer()))
    return answer


@pytest.mark.timeout(30)
@pytest.mark.parametrize("arrives", [True, False])
def test_a_worker_outlives_a_trainer_that_dies(
    tmp_path: Path, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(arrives)
    monkeypatch.setattr(transfer_group, "join_group", lambda request, device: group)
    worker = TransferGroup(torch.device("cpu"), receives=True)
    carry_out(worker, JOIN)
    path = tmp_path / "part"
    answer = carry_out(worker, ReceivePart(path=str(path), size=SIZE))
    if arrives:
        assert "ok" in answer
        assert path.read_bytes() == bytes([7]) * SIZE
    else:
        assert answer["error"]["type"] == "UploadTooSlow"
        assert "took longer than 0.2 s" in answer["error"]["message"]
    assert group.aborted != arrives
