"""The communicator of `vllm_cpu_ray`; it is a module of its own as it imports the platform."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import in_the_same_node_as


class HostsCommunicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's own for CPUs, which takes ranks under Ray for ranks of one host.

    It compares the port at which they meet, and that is the same for all of them.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return all(in_the_same_node_as(self.cpu_group))
