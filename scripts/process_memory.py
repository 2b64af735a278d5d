"""Memory of Linux processes, in bytes: the figures that psutil does not have."""

from __future__ import annotations

from pathlib import Path

# Mapped files are left out: which of their pages are in memory depends on what else runs on the
# machine. psutil has the proportional share of all mappings only.
_COUNTED = {"Pss_Anon:", "Pss_Shmem:", "SwapPss:"}
_RESET_PEAK = "5"  # see proc(5), clear_refs


def unmapped_bytes(pid: int) -> int:
    """Return a process's anonymous memory and its share of shared memory, swapped or not.

    Raises:
        OSError: The process has ended, or belongs to another user.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    pairs = (line.split() for line in lines)
    return sum(int(pair[1]) << 10 for pair in pairs if pair[0] in _COUNTED)


def reset_peak() -> int:
    """Start a new peak of this process's resident memory; return what is resident now."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return peak_resident()


def peak_resident() -> int:
    """Return the most memory that this process had resident since `reset_peak`.

    `resource.getrusage` is no substitute: its peak cannot be reset.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
