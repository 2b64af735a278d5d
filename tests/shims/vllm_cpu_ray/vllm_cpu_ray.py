"""A platform plugin of vLLM: the CPU, on which vLLM's executor for Ray starts.

vLLM asks its platform which resource of a Ray cluster a worker takes, and its platform for CPUs has
none. Here a worker takes a "GPU", and tests start Ray's nodes with as many as they want.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    """Return the name of the platform; vLLM calls this in each of its processes."""
    return f"{__name__}.{RayCpuPlatform.__name__}"


class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """vLLM's own platform for CPUs, with that resource, and a communicator for several hosts."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_cpu_ray_communicator.HostsCommunicator"
